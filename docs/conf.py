"""The site: the book in both languages, and the pages about the engine. Sphinx reads this file.

    pip install -e ".[docs]" && sphinx-build docs docs/_build
    sphinx-build -D source_url=https://CODE_HOST/NAME/blob/main docs docs/_build    # links to source files lead there

The pages are plain Markdown, whose links work on a code host. Three kinds of links must change for the site: those to
README.md, which is the site's first page, to source files, and to recordings, which become pages. The site needs no
network, except that its page `what_if.html` loads Pyodide when a reader asks a question there. With
`-D pyodide_url=pyodide`, it takes a copy from the folder `pyodide` of the site.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from furo.navigation import get_navigation_tree
from sphinx import addnodes
from sphinx.application import Sphinx

from nanovllm_extras.trace.page import make_page
from nanovllm_extras.what_if.browser.site import PYODIDE_URL, RECORDINGS, write_site

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BOOK, CHINESE = "book/", "book/zh/"
WHAT_IF = "nanovllm_extras/what_if/browser"
"""Links to this folder lead to the page that it makes, `what_if.html`."""

project = "nanovllm"
html_title = "nanovllm"
html_theme = "furo"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.githubpages"]  # the second writes .nojekyll
exclude_patterns = ["_build"]
highlight_language = "text"  # of blocks that name no language: drawings and outputs
smartquotes = False  # an option is --trace, with two hyphens
myst_enable_extensions = ["tasklist"]  # the boxes of the routes
myst_heading_anchors = 4  # as a code host makes them
myst_url_schemes = ["http", "https", "mailto", "repository"]
suppress_warnings = ["misc.highlighting_failure"]  # an ellipsis in shortened code

# [words](path#anchor); the words may stand on several lines
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
PREFORMATTED = re.compile(r"<pre>.*?</pre>", re.DOTALL)
WIDE = re.compile("[\u2e80-\u9fff\uff00-\uff60]")  # characters that take two columns; none is part of a tag
FIRST_PAGES = {"index": ROOT / "README.md", "index.zh": ROOT / "README.zh.md"}  # page of the site -> its text
CHINESE_WORDS: dict[str, str] = json.loads((DOCS / "book" / "terms.json").read_text(encoding="utf-8"))["site"]


def setup(app: Sphinx) -> None:
    app.add_config_value("source_url", "", "env", [str])
    app.add_config_value("pyodide_url", PYODIDE_URL, "html", [str])
    app.connect("source-read", prepare)
    app.connect("doctree-read", resolve_links)
    app.connect("html-page-context", adapt_to_language)
    app.connect("html-page-context", write_sidebar, priority=900)  # after the theme's own
    app.connect("build-finished", write_recordings)
    app.connect("build-finished", write_what_if)


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """README is the text of the first page. Links that leave docs/, or lead to recordings, become `repository:PATH`."""
    page = FIRST_PAGES.get(docname, DOCS / f"{docname}.md")
    if docname in FIRST_PAGES:
        source[0] = page.read_text(encoding="utf-8") + source[0]
        app.env.note_dependency(str(page))

    def adapt(link: re.Match[str]) -> str:
        path, anchor = link.groups(default="")
        target = (page.parent / path).resolve()
        for name, text in FIRST_PAGES.items():
            target = DOCS / f"{name}.md" if target == text else target
        if target.is_relative_to(DOCS) and target.suffix != ".jsonl":
            return f"]({os.path.relpath(target, (DOCS / docname).parent)}{anchor})"
        return f"](repository:{os.path.relpath(target, ROOT)}{anchor})"

    source[0] = LINK.sub(adapt, source[0])


def resolve_links(app: Sphinx, doctree: nodes.document) -> None:
    for link in list(doctree.findall(nodes.reference)):
        scheme, _, path = link.get("refuri", "").partition(":")
        if scheme != "repository":
            continue
        if path.rstrip("/") == WHAT_IF:
            link["refuri"] = what_if_page(app.env.docname)
        elif ".jsonl" in path:
            link["refuri"] = recording_page(path, app.env.docname)
        elif app.config.source_url:
            link["refuri"] = f"{app.config.source_url}/{path}"
        else:
            link.replace_self(link.children)


def recording_page(path: str, docname: str) -> str:
    """The address of the page that replays this recording, at the step and in the language of the link."""
    path, _, shown = path.partition("#")
    page = (ROOT / path).with_suffix(".html")
    look = "&lang=zh" if docname.startswith(CHINESE) else ""
    return f"{os.path.relpath(page, (DOCS / docname).parent)}#{shown}{look}"


def what_if_page(docname: str) -> str:
    """Return the address of the page that runs the scheduler, in the language of the link."""
    look = "#lang=zh" if docname.startswith(CHINESE) else ""
    return os.path.relpath(DOCS / "what_if.html", (DOCS / docname).parent) + look


def adapt_to_language(app: Sphinx, docname: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give a page the words of its language, a link to the same page in the other one, and no next page in it."""
    if is_chinese(docname):
        context["language"] = "zh-CN"
        context["_"] = context["gettext"] = translate
        context["master_doc"] = "index.zh"  # where the name of the project leads
        twin, language, name = docname.replace(CHINESE, BOOK).removesuffix(".zh"), "en", "English"
    else:
        twin = docname.replace(BOOK, CHINESE) if docname.startswith(BOOK) else f"{docname}.zh"
        language, name = "zh-CN", "中文"
    if docname == "index.zh":
        context["prev"] = None  # the last page in English
    elif context.get("next") and context["next"]["link"] == context["pathto"]("index.zh"):
        context["next"] = None
    context["body"] = PREFORMATTED.sub(widen, context.get("body", ""))
    if twin in app.env.found_docs:
        link = f'<a class="other-language" lang="{language}" href="{context["pathto"](twin)}">{name}</a>'
        context["body"] = link + context["body"]


def widen(block: re.Match[str]) -> str:
    """Mark the Chinese characters of a preformatted block, so that the style sheet gives each two columns."""
    return WIDE.sub(r'<span class="wide">\g<0></span>', block[0])


def is_chinese(docname: str) -> bool:
    return docname.startswith(CHINESE) or docname.endswith(".zh")


def translate(text: str) -> str:
    """Return a word of the theme in Chinese, as `terms.json` has it. Words that it does not have stay English."""
    return CHINESE_WORDS.get(text.strip(), text)


def write_sidebar(app: Sphinx, docname: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """List the pages in the language of this one: Chinese pages first the Chinese book, then the pages in English."""
    english = [toctree for toctree in toctrees_of(app, "index") if toctree.get("caption")]
    parts = english
    if is_chinese(docname):
        parts = toctrees_of(app, "index.zh") + [toctree for toctree in english if toctree["caption"] in CHINESE_WORDS]
    html = ""
    for toctree in parts:
        if is_chinese(docname):
            toctree["caption"] = translate(toctree["caption"])
        known = docname if docname in app.env.found_docs else "index"  # the page of the search has no document
        resolved = app.env.resolve_toctree(known, app.builder, toctree, titles_only=True, includehidden=True)
        html += app.builder.render_partial(resolved)["fragment"] if resolved else ""
    context["furo_navigation_tree"] = get_navigation_tree(html)


def toctrees_of(app: Sphinx, docname: str) -> list[addnodes.toctree]:
    return [toctree.deepcopy() for toctree in app.env.get_doctree(docname).findall(addnodes.toctree)]


def write_what_if(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        recordings = [DOCS / BOOK / "recordings" / f"{name}.jsonl" for name in RECORDINGS]
        write_site(Path(app.outdir), "what_if.html", recordings, app.config.pyodide_url)


def write_recordings(app: Sphinx, error: Exception | None) -> None:
    for recording in [] if error else (DOCS / BOOK / "recordings").glob("*.jsonl"):
        page = Path(app.outdir, recording.relative_to(DOCS)).with_suffix(".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(make_page([recording]), encoding="utf-8")
