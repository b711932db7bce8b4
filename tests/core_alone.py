"""The core alone: a copy of the checkout without any extra, and what it answers there.

    python -m tests.core_alone FOLDER       # make such a copy, in which `.ci/run` runs the core's own tests

`EXTRAS` says what can be deleted; `tests/test_core.py` compares the copy's answers with those of the whole package.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanovllm"
CORE_MODELS = ("__init__", "config", "decoder", "qwen3", "registry")
EXTRAS = (
    *(PACKAGE / name for name in ("extras", "kernels", "parallel", "serve", "trace")),
    *(path for path in sorted(PACKAGE.glob("models/*.py")) if path.stem not in CORE_MODELS),
)
# What an installed package's finder would bring back: the copy must find its own files only.
FORGET_INSTALLED = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(getattr(one, "__module__", one)).lower()]
"""


def core_files() -> list[Path]:
    """The Python files that are left, relative to the package."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not any(path.is_relative_to(one) for one in EXTRAS)]
    return [path.relative_to(PACKAGE) for path in files]


def copy_core(folder: Path) -> Path:
    """A copy of package, tests and example in `folder`, without any extra."""
    names = ("nanovllm", "tests", "example.py", "pyproject.toml")
    for name in names:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for path in EXTRAS:
        deleted = folder / path.relative_to(ROOT)
        if deleted.is_dir():
            shutil.rmtree(deleted)
        else:
            deleted.unlink()
    (folder / "sitecustomize.py").write_text(FORGET_INSTALLED, encoding="utf-8")
    return folder


def run_in(folder: Path, *arguments: str) -> str:
    """What `python *arguments` prints in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


if __name__ == "__main__":
    print(copy_core(Path(sys.argv[1]).resolve()))
