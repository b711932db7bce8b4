"""`nanovllm view run.jsonl`: show the page of a recording in a browser, or write it.

nanovllm view                                # show the recording that comes with the package
nanovllm view run.jsonl                      # show the page of a recording, and answer its "what if"
nanovllm view run.jsonl -o run.html          # write the page
nanovllm view with.jsonl without.jsonl       # two recordings side by side, scrubbed together
nanovllm view run.jsonl --gif story.gif      # an animated GIF of its story
nanovllm view run.jsonl --perfetto run.json  # for https://ui.perfetto.dev

`what_if/view_command.py` is the command: it also serves the page, so that the page can ask "what if".
"""

import argparse
import json
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.gif import make_gif
from nanovllm_extras.trace.page import make_page
from nanovllm_extras.trace.perfetto import to_perfetto
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.replay import ReplayError

STORY = Path(__file__).with_name("story.jsonl")  # made by tools/story_recording.py


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanovllm view", description="Replay a recording in a browser.")
    parser.add_argument(
        "recording",
        type=Path,
        nargs="?",
        default=STORY,
        help="a file that LLM(…, trace=…) or --trace wrote",
    )
    parser.add_argument("second", type=Path, nargs="?", help="a second recording, shown next to the first")
    parser.add_argument("-o", "--output", type=Path, metavar="HTML", help="write the page to this file, do not open it")
    parser.add_argument("--perfetto", type=Path, metavar="JSON", help="export one recording in Chrome's trace format")
    parser.add_argument("--gif", type=Path, help="write an animated GIF of the story instead (needs the extra browser)")
    parser.add_argument("--steps", type=steps_of, metavar="12-16,20", help="steps for --gif, instead of the story")
    return parser


def steps_of(text: str) -> list[int]:
    """Parse ranges of steps: "12-14,20" -> [12, 13, 14, 20]."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [step for first, _, last in ranges for step in range(int(first), int(last or first) + 1)]


def main(arguments: list[str] | None = None, show: Callable[[list[Path]], object] | None = None) -> int:
    """Run the command. `show` shows the page of one or two recordings; by default as a file (`open_page`)."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.perfetto and args.second:
        parser.error(f"--perfetto exports one recording, got {args.recording} and {args.second}")
    paths = [path for path in (args.recording, args.second) if path is not None]
    try:
        recordings = [read_recording(path) for path in paths]
        for path, lines in zip(paths, recordings, strict=True):
            check_recording(path, lines)
        if args.perfetto:
            write(args.perfetto, export(args.recording, recordings[0]))
        page = make_page(paths) if args.output or args.gif else ""
        if args.output:
            write(args.output, page)
        if args.gif:
            write(args.gif, make_gif(page, args.steps))
    except ValueError as error:
        parser.error(str(error))
    if not (args.output or args.perfetto or args.gif):
        (show or open_page)(paths)
    return 0


def export(path: Path, lines: list[dict[str, Any]]) -> str:
    try:
        return json.dumps(to_perfetto(lines), separators=(",", ":"))
    except ReplayError as error:
        raise ValueError(f"{path} cannot be exported: {error}") from error


def write(path: Path, content: str | bytes) -> None:
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    print(path)


def open_page(paths: list[Path]) -> Path:
    """Write the page to a new temporary file, open it in the browser, and return its path. The file is not deleted."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="nanovllm-", encoding="utf-8", delete=False) as file:
        file.write(make_page(paths))
    print(file.name)
    webbrowser.open(Path(file.name).as_uri())
    return Path(file.name)
