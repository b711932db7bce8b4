"""Make the recordings of the book, and the pictures of the page that replays them.

    python -m tools.book_pictures                    # make what is missing or differs from its demonstration
    python -m tools.book_pictures --only preemption  # only this demonstration; take its pictures again
    python -m tools.book_pictures --all              # make everything again, with the times of this machine

A chapter requests a recording and a picture by a link. The link's address says what the page shows:

    [![What one sees](images/preemption.png)](recordings/preemption.jsonl#step=12&seq=3)

`python -m labs.demos.preemption --trace FILE` makes the recording. Needs the extra `browser`, and Chromium.
"""

import argparse
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_extras.trace.page import make_page
from nanovllm_extras.trace.recording import read_recording
from tools.book import BOOK, run

WIDTH, LAST = 1440, ".timeline"  # a picture shows the pool, the step and the timeline
LOOK = "theme=light&lang=en"
LINK = re.compile(r"\[!\[[^\]]*\]\(images/([\w-]+)\.png\)\]\(recordings/([\w-]+)\.jsonl(?:#([^)]*))?\)")
TIMES = {"add": 2, "fork": 6, "schedule": 2, "update": 2, "finish": 5, "roll_back": 1}  # event -> index of its time


class Picture(NamedTuple):
    name: str
    demo: str  # module of labs/demos; also the name of the recording
    address: str  # what the page shows: step=12&seq=3

    @property
    def file(self) -> Path:
        return BOOK / "images" / f"{self.name}.png"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the recordings and pictures of the book.")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this demonstration; may be repeated")
    parser.add_argument("--all", action="store_true", help="make all again, even recordings with the same events")
    args = parser.parse_args()
    wanted = [picture for picture in pictures() if args.only is None or picture.demo in args.only]
    if not wanted:
        parser.error(f"no chapter shows {args.only or 'a recording'}")
    demos = sorted({picture.demo for picture in wanted})
    renewed = {demo for demo in demos if renew(demo, args.all)}
    stale = [p for p in wanted if args.only or p.demo in renewed or not p.file.exists() or address_of(p) != p.address]
    photograph(stale)


def pictures() -> list[Picture]:
    """Return all pictures that the chapters link to, in order of appearance."""
    texts = [page.read_text(encoding="utf-8") for page in sorted(BOOK.glob("*.md"))]
    return [Picture(*found) for text in texts for found in LINK.findall(text)]


def recording_of(demo: str) -> Path:
    return BOOK / "recordings" / f"{demo}.jsonl"


def record(demo: str, path: Path) -> None:
    run(f"python -m labs.demos.{demo} --trace {path}")


def renew(demo: str, always: bool = False) -> bool:
    """Record again, and replace the old recording if its events differ. Returns whether it was replaced."""
    kept = recording_of(demo)
    with tempfile.TemporaryDirectory() as work:
        fresh = Path(work) / kept.name
        record(demo, fresh)
        if not always and kept.exists() and read_events(kept) == read_events(fresh):
            return False
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fresh, kept)
    print(kept)
    return True


def read_events(path: Path) -> list[Any]:
    """Read a recording without the parts that differ from run to run and from machine to machine."""
    header, *lines = read_recording(path)
    config = {name: value for name, value in header["config"].items() if name != "description"}  # has the threads
    events = [[without_time(event) for event in line["events"]] for line in lines]
    return [header | {"t": 0, "config": config}, events, [line.get("texts") for line in lines]]


def without_time(event: list[Any]) -> list[Any]:
    place = TIMES.get(event[0], len(event))
    return event[:place] + event[place + 1 :]


# ---- pictures; their metadata contains the address at which they were taken


def photograph(wanted: list[Picture]) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    from tools.trace_screenshots import take

    with tempfile.TemporaryDirectory() as work:
        pages = {picture.demo: Path(work) / f"{picture.demo}.html" for picture in wanted}
        for demo, page in pages.items():
            page.write_text(make_page([recording_of(demo)]), encoding="utf-8")
        take([(pages[p.demo], p.file, WIDTH, f"#{p.address}&{LOOK}") for p in wanted], last=LAST)
    for picture in wanted:
        about = PngInfo()
        about.add_text("address", picture.address)
        Image.open(picture.file).convert("RGB").save(picture.file, optimize=True, pnginfo=about)


def address_of(picture: Picture) -> str:
    from PIL import Image

    return str(Image.open(picture.file).info.get("address", ""))


if __name__ == "__main__":
    main()
