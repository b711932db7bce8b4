"""Write the page that answers "what if" without a server, and the files that it loads with the first question."""

import json
import shutil
from pathlib import Path

from nanovllm_extras.trace.page import make_page
from nanovllm_extras.what_if.browser.bundle import make_bundle

PYODIDE_VERSION = "314.0.7"
PYODIDE_URL = f"https://cdn.jsdelivr.net/pyodide/v{PYODIDE_VERSION}/full/"
"""The folder of pyodide.mjs. A copy of it on one's own server works, too."""
RECORDINGS = "fragmentation", "preemption", "beyond"
"""Of docs/book/recordings, those that the page has. `viewer/i18n.js` has a title of each."""
WORKER, FILES = "what_if_worker.js", "what_if_files.json"


def write_site(folder: Path, name: str, recordings: list[Path], pyodide: str = PYODIDE_URL) -> None:
    """Write the page `name`, its worker and its Python files to `folder`. The page shows the first recording.

    pyodide: the address of Pyodide's folder, absolute or relative to the page
    """
    site = {"worker": WORKER, "files": FILES, "pyodide": pyodide.rstrip("/") + "/"}
    (folder / name).write_text(make_page(recordings, site=site), encoding="utf-8")
    (folder / FILES).write_text(json.dumps(make_bundle(), ensure_ascii=False), encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("worker.js"), folder / WORKER)
