"""The book: each chapter has its parts, both languages say the same, recordings and pictures are those of the links.
And `tools/book.py`, which puts code and outputs into the pages. Links of the pages: `test_readme.py`.
"""

import inspect
import json
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from nanovllm.block_manager import BlockManager
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.trace.recording import read_recording
from tools import book, book_pictures

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "docs" / "book"
CHAPTERS = [
    "01_one_token.md",
    "02_kv_cache.md",
    "03_what_a_step_waits_for.md",
    "04_one_step.md",
    "05_blocks_and_tables.md",
    "06_paged_attention.md",
    "07_sharing.md",
    "08_chunked_prefill.md",
    "09_when_memory_is_full.md",
    "10_from_logits_to_text.md",
    "11_making_it_fast.md",
    "12_beyond_one_engine.md",
    "13_speculation.md",
    "14_kv_beyond_the_pool.md",
    "15_state_beside_pages.md",
]
PARTS = ["The idea", "Predict", "Measure", "The code", "See it", "Beyond", "Build it", "Three questions"]
ROUTES = ["route_afternoon.md", "route_weekend.md", "route_everything.md"]
PAGES = ["README.md", *CHAPTERS, *ROUTES, "course_notes.md", "glossary.md", "interview.md"]
MAX_SECONDS = 60  # of processor time, of a command that takes 10 seconds on two idle cores


def read(name):
    return (BOOK / name).read_text(encoding="utf-8")


def without_blocks(text):
    """Without what cog has put in, comments, and blocks of code."""
    text = re.sub(r"(\[\[\[cog .*?\]\]\] -->).*?(<!-- \[\[\[end\]\]\] -->)", r"\1\2", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(text):
    """(level, words) of each."""
    return re.findall(r"^(#+) (.*)$", without_blocks(text), re.MULTILINE)


def commands(text):
    """The lines of the blocks of commands, without comments; a command may go on behind a backslash."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def cog_calls(text):
    return re.findall(r"\[\[\[cog (.*?) ?\]\]\]", text, re.DOTALL)


def test_all_pages_are_there():
    pages = [*PAGES, *(f"zh/{name}" for name in PAGES)]
    assert [name for name in pages if not (BOOK / name).exists()] == []
    assert {path.name for path in BOOK.glob("**/[0-9]*.md")} <= set(CHAPTERS)


# ---- a chapter


def test_a_chapter_has_its_parts():
    for number, name in enumerate(CHAPTERS, 1):
        (level, title), *parts = [one for one in headings(read(name)) if len(one[0]) <= 2]
        assert level == "#"
        assert title.startswith(f"{number}. ")
        assert parts == [("##", part) for part in PARTS]
        measure = read(name).partition("\n## Measure\n")[2].partition("\n## ")[0]
        assert [line for line in commands(measure) if line.startswith("python -m ")]


def test_the_last_line_leads_on():
    for i, name in enumerate(CHAPTERS):
        for page in (name, f"zh/{name}"):
            links = re.findall(r"\]\(([^)]+)\)", read(page).rstrip().splitlines()[-1])
            neighbours = CHAPTERS[max(i - 1, 0) : i] + CHAPTERS[i + 1 : i + 2]
            assert sorted(links) == sorted(["README.md", *neighbours])


def test_the_contents_name_all_chapters():
    titled = re.findall(r"^\| \[(\d+)\. [^\]]+\]\((.*?)\) \|", read("README.md"), re.MULTILINE)
    assert titled == [(str(number), name) for number, name in enumerate(CHAPTERS, 1)]


# ---- both languages


@pytest.mark.parametrize("name", [*PAGES, "../learn"])
def test_both_languages_run_and_show_the_same(name):
    pages = ("../learn.md", "../learn.zh.md") if name == "../learn" else (name, f"zh/{name}")
    english, chinese = map(read, pages)
    assert [level for level, _ in headings(chinese)] == [level for level, _ in headings(english)]
    assert commands(chinese) == commands(english)
    assert cog_calls(chinese) == cog_calls(english)
    assert pictures_in(chinese, up="../") == pictures_in(english)


def pictures_in(text, up=""):
    """The addresses of the book's pictures, and of recordings that they lead to; `up` leads to the book's folder."""
    return re.findall(rf"\]\({re.escape(up)}((?:images|recordings)/[^)]+)\)", text)


def test_the_glossary_names_what_is_here():
    sources = [path for folder in ("nanovllm", "nanovllm_extras", "labs") for path in (ROOT / folder).glob("**/*.py")]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    column = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \|$", read("glossary.md"), re.MULTILINE)
    symbols = {symbol for here in column for symbol in re.findall(r"`([^`]+)`", here)}
    assert len(symbols) > 50
    paths = {symbol for symbol in symbols if "/" in symbol}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [symbol for symbol in symbols - paths if not words.issuperset(re.findall(r"\w+", symbol))] == []


# ---- recordings and pictures

ADDS = ("add", "fork")  # the events in which a sequence comes
PICTURES = book_pictures.pictures()


@pytest.mark.parametrize("picture", PICTURES, ids=[picture.name for picture in PICTURES])
def test_a_picture_shows_what_its_link_says(picture):
    shown = dict(part.split("=") for part in picture.address.split("&"))
    lines = read_recording(book_pictures.recording_of(picture.demo))[1:]
    events = [event for line in lines for event in line["events"]]
    assert 1 <= int(shown["step"]) <= max(event[1] for event in events if event[0] == "schedule")
    if "seq" in shown:
        assert int(shown["seq"]) in {event[1 if event[0] == "add" else 2] for event in events if event[0] in ADDS}
    assert book_pictures.address_of(picture) == picture.address, "python -m tools.book_pictures"


def test_nothing_lies_beside_the_pages_unused():
    text = "\n".join(path.read_text(encoding="utf-8") for path in BOOK.glob("**/*.md"))
    files = [*(BOOK / "images").glob("*"), *(BOOK / "recordings").glob("*")]
    assert [path.name for path in files if f"{path.parent.name}/{path.name}" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("demo", sorted({picture.demo for picture in PICTURES}))
def test_a_recording_is_what_its_demonstration_records(demo, tmp_path):
    """If this fails: python -m tools.book_pictures"""
    book_pictures.record(demo, tmp_path / "fresh.jsonl")
    fresh, kept = tmp_path / "fresh.jsonl", book_pictures.recording_of(demo)
    assert book_pictures.read_events(fresh) == book_pictures.read_events(kept)


def make_recording(path, time, token_id):
    header = {
        "format": "nanovllm-trace",
        "version": 1,
        "num_blocks": 4,
        "t": time,
        "config": {"description": str(time)},
    }
    events = [["add", 1, time, {"tokens": [5]}], ["take", 1, 2, 0], ["update", 1, time, [token_id]]]
    line = {"t": time, "events": events, "times": {"run": time}}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n")


def test_a_recording_is_kept_until_it_tells_something_else(monkeypatch, tmp_path):
    monkeypatch.setattr(book_pictures, "BOOK", tmp_path)
    made = iter([(10, 7), (20, 7), (30, 7), (40, 8)])  # (time, token)
    monkeypatch.setattr(book_pictures, "record", lambda demo, path: make_recording(path, *next(made)))

    def renewed_at(always=False):
        is_new = book_pictures.renew("demo", always)
        return is_new, json.loads((tmp_path / "recordings" / "demo.jsonl").read_text().splitlines()[0])["t"]

    assert renewed_at() == (True, 10)
    assert renewed_at() == (False, 10)
    assert renewed_at(always=True) == (True, 30)
    assert renewed_at() == (True, 40)


# ---- the commands


FILES = ("--trace", "--plot", "--json")  # options whose value is a file to write


def unchecked_commands():
    """Return the longest command of each module that the chapters run with `python -m`, without the modules of which
    `tools.book --check` compares an output, or a test above a recording.
    """
    found, run = {}, {f"labs.demos.{picture.demo}" for picture in PICTURES}
    for text in map(read, CHAPTERS):
        run |= {module for call in cog_calls(text) for module in re.findall(r'^output\("python -m ([\w.]+)', call)}
        for command in commands(text):
            command = command.partition(" && ")[0]
            if command.startswith("python -m "):
                module = command.split()[2]
                found[module] = max(found.get(module, ""), command, key=len)
    return [command for module, command in found.items() if module not in run]


def test_each_interview_question_has_a_command_of_a_chapter():
    """The commands of the chapters run, or their output is checked."""
    questions = re.split(r"^### \d+\. ", read("interview.md"), flags=re.MULTILINE)[1:]
    assert len(questions) == 20
    proofs = [commands(question) for question in questions]
    assert [len(proof) for proof in proofs] == [1] * 20
    assert {command for [command] in proofs} <= {command for name in CHAPTERS for command in commands(read(name))}


@pytest.mark.slow
@pytest.mark.parametrize("command", unchecked_commands())
def test_commands_run_in_seconds(command, tmp_path, monkeypatch):
    monkeypatch.setattr(book, "run_module", run_and_time)
    words = shlex.split(command)
    for i, word in enumerate(words[:-1]):
        if word in FILES:
            words[i + 1] = str(tmp_path / words[i + 1])
    *_, seconds = book.run(shlex.join(words)).splitlines()
    assert 0 < float(seconds) < MAX_SECONDS


def run_and_time(module, arguments, sender):
    """As `book.run_module`, in the same process; the last line that is sent is the processor time of the command."""
    begin = sum(os.times()[:4])

    class Sender:
        def send(self, printed):
            sender.send(f"{printed}\n{sum(os.times()[:4]) - begin}")

    book.run_module(module, arguments, Sender())


# ---- tools/book.py


@pytest.mark.parametrize("symbol", [BlockManager.try_admit, Sequence])
def test_an_excerpt_is_the_source(symbol):
    path = Path(inspect.getsourcefile(symbol))
    assert book.excerpt(path, symbol.__qualname__) == textwrap.dedent(inspect.getsource(symbol)).rstrip("\n")


SOURCE = '''
import functools


class Pool:
    """All blocks."""

    @functools.cache
    def size(self):
        """How many.

        Never changes.
        """
        # a reason
        return 3

    async def wait(self):
        return None
'''


def test_an_excerpt_without_its_docstring(tmp_path):
    path = tmp_path / "pool.py"
    path.write_text(SOURCE)
    expected = "@functools.cache\ndef size(self):\n    # a reason\n    return 3"
    assert book.excerpt(path, "Pool.size", docstring=False) == expected
    assert book.excerpt(path, "Pool.wait", docstring=False) == "async def wait(self):\n    return None"
    with pytest.raises(ValueError, match=r"pool\.py has no Pool\.grow"):
        book.excerpt(path, "Pool.grow")


@pytest.fixture
def page(tmp_path):
    """Makes a page that asks for these calls."""

    def make(*calls, name="page.md"):
        path = tmp_path / name
        path.write_text("".join(f"<!-- [[[cog {call} ]]] -->\n<!-- [[[end]]] -->\n" for call in calls))
        return path

    return make


@pytest.fixture
def run_book(monkeypatch, capsys):
    """`python -m tools.book …`: its exit status, and what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["book", *map(str, arguments)])
        monkeypatch.delenv(book.REFRESH, raising=False)
        with pytest.raises(SystemExit) as end:
            book.main()
        monkeypatch.delenv(book.REFRESH, raising=False)
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out + printed.err

    return run


def test_a_page_gets_code_with_a_link_to_its_file(page, run_book):
    path = page('code("nanovllm/block_manager.py", "BlockManager.try_admit")')
    assert run_book(path)[0] == 0
    text = path.read_text()
    assert f"```python\n{textwrap.dedent(inspect.getsource(BlockManager.try_admit))}```\n" in text
    link = re.search(r"\[`nanovllm/block_manager.py`\]\((.*?)\)", text)[1]
    assert (path.parent / link).resolve() == ROOT / "nanovllm" / "block_manager.py"


def test_check_names_the_stale_page_and_writes_nothing(page, run_book, monkeypatch):
    outputs = {"python -m one": "1", "python -m two": "2"}
    monkeypatch.setattr(book, "run", outputs.__getitem__)
    fresh = page('output("python -m one")', name="fresh.md")
    stale = page('output("python -m two")', name="stale.md")
    assert run_book(fresh, stale)[0] == 0
    assert "```text\n2\n```" in stale.read_text()
    assert run_book("--check", fresh, stale)[0] == 0
    outputs["python -m two"] = "3"
    status, printed = run_book("--check", fresh, stale)
    assert status != 0
    assert "stale.md" in printed
    assert "fresh.md" not in printed
    assert "+3" in printed
    assert "```text\n2\n```" in stale.read_text()


def test_a_sample_stays_until_it_is_refreshed(page, run_book, monkeypatch):
    times = iter("123")
    monkeypatch.setattr(book, "run", lambda command: next(times))
    path = page('sample("python -m timing")')
    for arguments, shown in [((), 1), ((), 1), (("--check",), 1), (("--refresh",), 2), ((), 2)]:
        assert run_book(*arguments, path)[0] == 0
        assert f"```text\n{shown}\n```" in path.read_text()


COMMAND = """
import pathlib, sys, torch
with pathlib.Path(sys.argv[1]).open("a") as file:
    file.write("x")
print(torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype())
torch.set_num_threads(torch.get_num_threads() + 1)
torch.manual_seed(torch.initial_seed() + 1)
torch.set_default_dtype(torch.float64)
sys.exit(sys.argv[2] if len(sys.argv) > 2 else None)
"""


@pytest.mark.slow
def test_a_command_runs_once_and_leaves_nothing_to_the_next(monkeypatch, tmp_path):
    (tmp_path / "a_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    one, two = (f"python -m a_command {tmp_path / name}" for name in ("one", "two"))
    assert book.run(one) == book.run(two)
    assert book.run(one)
    assert (tmp_path / "one").read_text() == "x"
    with pytest.raises(RuntimeError, match=r"a_command .* ended with 1"):
        book.run(f"{one} 'has failed'")
