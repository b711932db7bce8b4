"""How do recordings become one HTML file? All is inside: the program, its libraries with their licences, the data.

The program is a dozen small modules in `viewer/`. They are put one below the other, in the order of their imports, and
their import and export lines are left out: so it needs no build step, and works from `file://`, where a browser loads
no modules. The libraries in `viewer/vendor/` are preact, htm and uPlot as they were published.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from nanovllm.trace.symbols import read_sources

VIEWER = Path(__file__).parent / "viewer"
LIBRARIES = ("preact.js", "hooks.js", "htm.js", "uplot.js")
LICENCES = ("LICENSE-preact", "LICENSE-htm", "LICENSE-uplot")
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w]+\.js)";\n', re.MULTILINE)
EXPORTED = re.compile(r"^export (?=async function|function|class|const|let)", re.MULTILINE)
EXPORT_LIST = re.compile(r"^export \{[^}]*\};\n", re.MULTILINE)


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
