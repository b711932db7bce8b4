"""The page of the site in Chromium, with Pyodide from a folder of this machine."""

import contextlib
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm_extras.what_if.browser.site import PYODIDE_VERSION, RECORDINGS, write_site

ROOT = Path(__file__).resolve().parents[3]
PATHS = [ROOT / "docs" / "book" / "recordings" / f"{name}.jsonl" for name in RECORDINGS]
FOLDER = "NANOVLLM_PYODIDE"


def pyodide_folder() -> Path:
    """Return the folder of the interpreter. Skips the test if there is none."""
    folder = Path(os.environ.get(FOLDER, ""))
    if not (folder / "pyodide.asm.wasm").exists():
        pytest.skip(f"needs Pyodide: unpack npm's package pyodide@{PYODIDE_VERSION}, and set {FOLDER} to its folder")
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript",
                      ".js": "text/javascript", ".wasm": "application/wasm"}  # fmt: skip

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serve_site(folder: Path) -> Iterator[str]:
    """Write the page to `folder` and serve it. Gives the page's address."""
    (folder / "pyodide").symlink_to(pyodide_folder().resolve())
    write_site(folder, "what_if.html", PATHS, "pyodide")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/what_if.html"
    server.shutdown()
    server.server_close()
