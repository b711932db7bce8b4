"""The core by itself: a copy of the checkout without `nanovllm_extras` and `labs`, and what it answers there.

python -m tests.core_alone FOLDER       # make such a copy, in which `.ci/run` runs the core's own tests
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanovllm"
EXTRAS = ROOT / "nanovllm_extras"
TESTING = ROOT / "nanovllm_testing"
# What an installed package's finder would bring back: the copy must find its own files only.
FORGET_INSTALLED = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(getattr(one, "__module__", one)).lower()]
"""


def copy_core(folder: Path) -> Path:
    """Copy the package `nanovllm`, its own tests with the package that they use, and the examples to `folder`."""
    ignored = shutil.ignore_patterns("__pycache__", "extras", "labs", "repository")
    for name in ("nanovllm", "nanovllm_testing", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("example.py", "bench.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "sitecustomize.py").write_text(FORGET_INSTALLED, encoding="utf-8")
    return folder


def run_in(folder: Path, *arguments: str) -> str:
    """Return what `python *arguments` prints in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


if __name__ == "__main__":
    print(copy_core(Path(sys.argv[1]).resolve()))
