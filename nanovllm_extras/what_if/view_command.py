"""`nanovllm view`: the command of `trace/view.py`, with a page that can ask "what if"."""

import webbrowser
from pathlib import Path

from nanovllm_extras.trace import view
from nanovllm_extras.what_if.recording_file import read
from nanovllm_extras.what_if.server import WhatIfServer


def main(arguments: list[str] | None = None) -> int:
    return view.main(arguments, show)


def show(paths: list[Path]) -> None:
    """Open the page in the browser. For one recording that the core's scheduler can make, serve it until Ctrl-C.

    The page of other recordings has no "what if", so it is a file.
    """
    if len(paths) > 1:
        view.open_page(paths)
        return
    try:
        run, texts = read(paths[0])
    except ValueError as error:
        print(f"The page has no what-if. {error}")
        view.open_page(paths)
        return
    with WhatIfServer(paths[0], run, texts) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
