"""`make_page` puts recordings into one HTML file, with the page's program, its libraries and their licences.

The program is about thirty small modules in `viewer/`. `bundle` joins them in the order of their imports and removes
their import and export lines. So no build step is needed, and the page works from `file://`, where browsers refuse to
load modules. The libraries in `viewer/vendor/` are preact, htm and uPlot as they were published.

For each event the page can show the engine's code that decided it. `DECIDED_BY` names the function, and `read_sources`
finds it in the source files' text, so making a page needs neither the engine nor torch.
"""

import ast
import base64
import gzip
import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = Path(__file__).parents[2]  # the folder of both packages
VIEWER = Path(__file__).parent / "viewer"
LIBRARIES = ("preact.js", "hooks.js", "htm.js", "uplot.js")
LICENCES = ("LICENSE-preact", "LICENSE-htm", "LICENSE-uplot")
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w]+\.js)";\n', re.MULTILINE)
EXPORTED = re.compile(r"^export (?=async function|function|class|const|let)", re.MULTILINE)
EXPORT_LIST = re.compile(r"^export \{[^}]*\};\n", re.MULTILINE)

DECIDED_BY = {  # code of an event, or what `sourceOf` of events.js returns -> a file, and the function or method in it
    "start": "nanovllm/engine.py LLMEngine.reset",
    "add": "nanovllm/scheduler.py Scheduler.add",
    "fork": "nanovllm/scheduler.py Scheduler.fork",
    "tokens": "nanovllm_extras/beam_search/search.py BeamSearch._go_on",
    "finish": "nanovllm/scheduler.py Scheduler.finish",
    "wait": "nanovllm/scheduler.py Scheduler.admit_waiting",
    "idle": "nanovllm/scheduler.py Scheduler.schedule",
    "admit": "nanovllm/block_manager.py BlockManager.try_admit",
    "miss": "nanovllm_extras/engine/prefix_misses.py PrefixMisses.explain",
    "preempt": "nanovllm/scheduler.py Scheduler.make_room",
    "draft": "nanovllm_extras/scheduling/drafter.py Drafter.draft",
    "schedule": "nanovllm/scheduler.py Scheduler.schedule",
    "verify": "nanovllm_extras/scheduling/drafter.py Drafter.verify",
    "update": "nanovllm/scheduler.py Scheduler.update",
    "roll_back": "nanovllm_extras/scheduling/roll_back.py roll_back",
    "take": "nanovllm/block_manager.py BlockManager.take",
    "share": "nanovllm/block_manager.py BlockManager._share",
    "copy": "nanovllm/block_manager.py BlockManager._copy_tail",
    "load": "nanovllm_extras/memory/store_link.py StoreLink._append",
    "give_back": "nanovllm_extras/memory/block_manager.py BlockManager.give_back",
    "free": "nanovllm/block_manager.py BlockManager.free",
    "register": "nanovllm/prefix_cache.py PrefixCache.register",
    "forget": "nanovllm/prefix_cache.py PrefixCache.forget",
    "reset": "nanovllm_extras/scheduling/roll_back.py reset_prefix_cache",
    "take.group": "nanovllm_extras/memory/block_manager.py BlockManager._take_in_groups",
    "share.group": "nanovllm_extras/memory/block_manager.py BlockManager._share_in_groups",
    "copy.group": "nanovllm_extras/memory/block_manager.py BlockManager._copy_tail",
    "register.group": "nanovllm_extras/memory/prefix_cache.py OtherGroups.registered",
    "give_back.group": "nanovllm_extras/memory/block_manager.py BlockManager.give_back",
    "admit.group": "nanovllm_extras/memory/block_manager.py BlockManager.try_admit",
    "slot": "nanovllm_extras/memory/slots.py Slots.admit",
    "slot.in": "nanovllm_extras/memory/slots.py Slots.copy_in",
    "move": "nanovllm_extras/memory/slots.py Slots.rewind",
    "move.out": "nanovllm_extras/memory/slots.py Slots.copy_out",
    "snapshot": "nanovllm_extras/memory/slots.py Slots.take_snapshot",
    "drop": "nanovllm_extras/memory/slots.py Slots._drop",
}


def make_page(
    recordings: list[Path], is_live: bool = False, can_ask: bool = False, site: Mapping[str, str] | None = None
) -> str:
    """Return the page with up to two recordings. A live page has none: it reads the server's events.

    can_ask: a server answers "what if" (`what_if/server.py`)
    site: addresses of the files with which the page answers by itself (`what_if/browser/site.py`). Such a page has any
        number of recordings, and shows the first one
    """
    shown, choices = (recordings, []) if site is None else (recordings[:1], recordings[1:])
    parts = {
        "licences": "\n".join((VIEWER / "vendor" / name).read_text(encoding="utf-8") for name in LICENCES),
        "style": (VIEWER / "vendor" / "uplot.css").read_text(encoding="utf-8") + read("style.css"),
        "live": " data-live" if is_live else "",
        "what_if": " data-what-if" if can_ask else "",
        "workers": "" if site is None else "; worker-src 'self'",
        "site": "" if site is None else f' data-site="{html.escape(json.dumps(site), quote=True)}"',
        "recordings": "\n".join([*map(embed, shown), *[embed(path, "choice") for path in choices]]),
        "libraries": "\n".join((VIEWER / "vendor" / name).read_text(encoding="utf-8") for name in LIBRARIES),
        "program": f"window.SOURCES = {to_script(read_sources())};\n{bundle('app.js')}",
    }
    parts["licences"] = parts["licences"].replace("--", "- -")  # "--" may not occur inside a comment
    page = read("page.html").replace("<!--{{licences}}-->", "<!--\n{{licences}}\n-->")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def read(name: str) -> str:
    return (VIEWER / name).read_text(encoding="utf-8")


def to_script(value: object) -> str:
    """Return `value` as JSON that can be put inside a script element."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")


def bundle(name: str) -> str:
    """Return the module `name` and all modules that it imports as one script, imported modules first."""
    return "\n".join(in_order(name, set()))


def in_order(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    text = read(name)
    for imported in IMPORT.findall(text):
        yield from in_order(imported, seen)
    yield f"// {name}\n" + EXPORT_LIST.sub("", EXPORTED.sub("", IMPORT.sub("", text)))


def embed(path: Path, kind: str = "trace") -> str:
    """Return a script element with the recording as base64 of gzip, which browsers can unpack.

    kind: `trace` for a recording that is shown, `choice` for one that can be chosen
    """
    data = base64.b64encode(gzip.compress(path.read_bytes(), mtime=0)).decode()
    name = html.escape(path.name, quote=True)
    return f'<script type="application/x-nanovllm-{kind}" data-name="{name}">{data}</script>'


# ---- the lines that decide an event


def read_sources() -> dict[str, dict[str, str | int]]:
    """Return, for each code of an event, the symbol, its file, its first line, and its text.

    Events of an extra that has been deleted are left out. Raises LookupError if a file has no such symbol.
    """
    sources: dict[str, dict[str, str | int]] = {}
    for code, place in DECIDED_BY.items():
        path, symbol = place.split()
        if (PACKAGES / path).exists():
            first, text = find_symbol((PACKAGES / path).read_text(encoding="utf-8"), place)
            sources[code] = {"symbol": symbol, "path": path, "line": first, "text": text}
    return sources


def find_symbol(source: str, place: str) -> tuple[int, str]:
    """Return the first line number and the text of the symbol that `place` names, dedented to its own column."""
    body = ast.parse(source).body
    for name in place.split()[1].split("."):
        definitions = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))
        found = next((node for node in definitions if node.name == name), None)
        if found is None:
            raise LookupError(f"DECIDED_BY names {place}, and {name} is not there")
        body = found.body
    assert found is not None
    first = min(node.lineno for node in (found, *found.decorator_list))
    lines = source.splitlines(keepends=True)[first - 1 : found.end_lineno]
    return first, "".join(line[found.col_offset :] if line.strip() else "\n" for line in lines)
