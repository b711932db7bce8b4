"""`make_page`: recordings as one HTML file. It holds the program, the libraries with their licences, and the data.

The program is a dozen small modules in `viewer/`. `bundle` joins them in the order of their imports and drops their
import and export lines: this needs no build step, and works from `file://`, where browsers refuse to load modules. The
libraries in `viewer/vendor/` are preact, htm and uPlot as they were published.

Beside each event the page shows the lines of the engine that decide it. `DECIDED_BY` names them, and `read_sources`
finds them in the files' text: the page needs no engine, and no torch.
"""

import ast
import base64
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2]
VIEWER = Path(__file__).parent / "viewer"
LIBRARIES = ("preact.js", "hooks.js", "htm.js", "uplot.js")
LICENCES = ("LICENSE-preact", "LICENSE-htm", "LICENSE-uplot")
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w]+\.js)";\n', re.MULTILINE)
EXPORTED = re.compile(r"^export (?=async function|function|class|const|let)", re.MULTILINE)
EXPORT_LIST = re.compile(r"^export \{[^}]*\};\n", re.MULTILINE)

DECIDED_BY = {  # code of an event -> a file of the package, and the function or method in it
    "start": "engine.py LLMEngine.recover",
    "add": "scheduler.py Scheduler.add",
    "fork": "scheduler.py Scheduler.fork",
    "tokens": "extras/beam_search/search.py BeamSearch._go_on",
    "finish": "scheduler.py Scheduler.finish",
    "wait": "scheduler.py Scheduler._admit_waiting",
    "idle": "scheduler.py Scheduler.schedule",
    "admit": "block_manager.py BlockManager.try_admit",
    "preempt": "scheduler.py Scheduler._make_room",
    "draft": "extras/speculation/speculative_scheduler.py SpeculativeScheduler._draft",
    "schedule": "scheduler.py Scheduler.schedule",
    "verify": "extras/speculation/speculative_scheduler.py SpeculativeScheduler._verify",
    "update": "scheduler.py Scheduler.update",
    "roll_back": "scheduler.py Scheduler.roll_back",
    "take": "block_manager.py BlockManager._take",
    "share": "block_manager.py BlockManager._share",
    "copy": "block_manager.py BlockManager._copy_tail",
    "give_back": "extras/window_blocks.py WindowBlockManager._give_back",
    "free": "block_manager.py BlockManager.free",
    "register": "prefix_cache.py PrefixCache.register",
    "forget": "prefix_cache.py PrefixCache.forget",
    "reset": "prefix_cache.py PrefixCache.reset",
}


def make_page(recordings: list[Path], is_live: bool = False) -> str:
    """The page with up to two recordings; a live page has none, and reads the server's events instead."""
    parts = {
        "licences": "\n".join((VIEWER / "vendor" / name).read_text(encoding="utf-8") for name in LICENCES),
        "style": (VIEWER / "vendor" / "uplot.css").read_text(encoding="utf-8") + read("style.css"),
        "live": " data-live" if is_live else "",
        "recordings": "\n".join(map(embed, recordings)),
        "libraries": "\n".join((VIEWER / "vendor" / name).read_text(encoding="utf-8") for name in LIBRARIES),
        "program": f"window.SOURCES = {to_script(read_sources())};\n{bundle('app.js')}",
    }
    parts["licences"] = parts["licences"].replace("--", "- -")  # two of them would end the comment
    page = read("page.html").replace("<!--{{licences}}-->", "<!--\n{{licences}}\n-->")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def read(name: str) -> str:
    return (VIEWER / name).read_text(encoding="utf-8")


def to_script(value: object) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")


def bundle(name: str) -> str:
    """The module `name` after all modules that it imports, as one script."""
    return "\n".join(in_order(name, set()))


def in_order(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    text = read(name)
    for imported in IMPORT.findall(text):
        yield from in_order(imported, seen)
    yield f"// {name}\n" + EXPORT_LIST.sub("", EXPORTED.sub("", IMPORT.sub("", text)))


def embed(path: Path) -> str:
    """A recording as base64 of gzip: what a browser can unpack by itself."""
    data = base64.b64encode(gzip.compress(path.read_bytes(), mtime=0)).decode()
    name = html.escape(path.name, quote=True)
    return f'<script type="application/x-nanovllm-trace" data-name="{name}">{data}</script>'


# ---- the lines that decide an event


def read_sources() -> dict[str, dict[str, Any]]:
    """For each code of an event: the symbol, its file inside the package, its first line, and its text.

    Events of an extra that has been deleted are left out. Raises LookupError if a file has no such symbol.
    """
    sources = {}
    for code, place in DECIDED_BY.items():
        path, symbol = place.split()
        if (PACKAGE / path).exists():
            first, text = find_symbol((PACKAGE / path).read_text(encoding="utf-8"), place)
            sources[code] = {"symbol": symbol, "path": path, "line": first, "text": text}
    return sources


def find_symbol(source: str, place: str) -> tuple[int, str]:
    """The first line of the symbol that `place` names, and its lines, with no indentation in front of the first."""
    found: Any = ast.parse(source)
    for name in place.split()[1].split("."):
        found = next((node for node in found.body if getattr(node, "name", None) == name), None)
        if found is None:
            raise LookupError(f"DECIDED_BY names {place}, and {name} is not there")
    first = min(node.lineno for node in (found, *found.decorator_list))
    lines = source.splitlines(keepends=True)[first - 1 : found.end_lineno]
    return first, "".join(line[found.col_offset :] if line.strip() else "\n" for line in lines)
