"""Put code and the output of commands into the pages of the book, and report which pages are stale.

    python -m tools.book                  # write the pages; then look at the difference
    python -m tools.book --check          # fail if a page differs from the code, or from what a command prints
    python -m tools.book --refresh        # also run the commands whose output differs from machine to machine

cogapp replaces the text between two comments by what the call in the first comment prints. The comments are invisible
on the rendered page:

    <!-- [[[cog code("nanovllm/scheduler.py", "Scheduler.update") ]]] -->
    <!-- [[[end]]] -->

`code` prints a function or class as it is in the file. `output` prints the output of a command, which must be the same
on each machine. `sample` prints what a command printed on one machine, and is not checked. Each command runs once for
all pages.

`exercises` prints the exercises of a chapter, and `route` the steps of a route through the book.

A page folds an output, so that the reader predicts it first. The lines around the two comments are part of the page:

    <details><summary>Output</summary>

    <!-- [[[cog output("python -m labs.demos.steps") ]]] -->
    <!-- [[[end]]] -->

    </details>
"""

import argparse
import ast
import contextlib
import functools
import io
import multiprocessing
import os
import runpy
import shlex
import sys
import textwrap
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "docs" / "book"
MAX_LINES = 30  # of an excerpt
REFRESH = "NANOVLLM_BOOK_REFRESH"


def code(path: str, symbol: str, docstring: bool = True) -> None:
    """Print `symbol` of a Python file (`Class.method`, or a function or class) as a block, with a link to the file."""
    import cog

    text = excerpt(ROOT / path, symbol, docstring)
    if (num_lines := text.count("\n") + 1) > MAX_LINES:
        raise ValueError(f"an excerpt may have {MAX_LINES} lines, {symbol} of {path} has {num_lines}")
    link = os.path.relpath(ROOT / path, Path(cog.inFile).parent)
    print(f"\n[`{path}`]({link}), `{symbol}`:\n\n```python\n{text}\n```\n")


def output(command: str) -> None:
    """Print what the command `python -m …` prints, which must be the same on every machine."""
    print(f"\n```text\n{run(command)}\n```\n")


def sample(command: str) -> None:
    """Print what `python -m …` printed when the page was refreshed. The page must say before it that outputs differ."""
    import cog

    if os.environ.get(REFRESH) or not cog.previous.strip():
        output(command)
    else:
        print(cog.previous, end="")


def exercises() -> None:
    """Print the exercises of `nanovllm learn` that belong to the page's chapter, in the page's language."""
    import cog

    from labs.learn.catalog import list_exercises
    from labs.learn.texts import Language

    page = Path(cog.inFile)
    language: Language = "zh" if page.parent.name == "zh" else "en"
    lines = [
        f"- `nanovllm learn start {exercise.name}`: {exercise.title.show(language)}"
        for exercise in list_exercises()
        if exercise.chapter == page.stem
    ]
    print("\n" + "\n".join(lines) + "\n")


def route(name: str) -> None:
    """Print the steps of a route of `nanovllm learn --route`, with a time for each, in the page's language."""
    import cog

    from tools.book_routes import list_steps

    print("\n" + list_steps(name, "zh" if Path(cog.inFile).parent.name == "zh" else "en") + "\n")


def excerpt(path: Path, symbol: str, docstring: bool = True) -> str:
    source = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for name in symbol.split("."):
        found = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name]
        if not found:
            raise ValueError(f"{path.name} has no {symbol}")
        node = found[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()
    kept = list(range(first - 1, node.end_lineno or first))
    if not docstring and ast.get_docstring(node) is not None:
        said = node.body[0]
        kept = [i for i in kept if not said.lineno - 1 <= i < (said.end_lineno or said.lineno)]
    return textwrap.dedent("\n".join(lines[i] for i in kept))


@functools.cache
def run(command: str) -> str:
    """Run `python -m MODULE ARGUMENTS …` and return its standard output. Raises RuntimeError if the command fails.

    Each command runs in its own process, so that no seed, thread or option affects the next command. The process is
    forked from one that has already imported torch, because the import takes seconds.
    """
    python, dash_m, module, *arguments = shlex.split(command)
    if (python, dash_m) != ("python", "-m"):
        raise ValueError(f"a command of the book begins with `python -m`, got {command!r}")
    print(f"  {command}", file=sys.stderr, flush=True)  # some take a minute on a busy machine
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanovllm.llm", "transformers.models.auto"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_module, args=(module, arguments, sender))
    process.start()
    sender.close()
    printed = ""
    with contextlib.suppress(EOFError):  # the command failed and sent nothing
        printed = receiver.recv()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{command} ended with {process.exitcode}")
    return printed.strip("\n")


def run_module(module: str, arguments: list[str], sender: Connection) -> None:
    """Run a module as a script in the new process, and send what it printed if it succeeds."""
    printed = io.StringIO()
    sys.argv = [module, *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    sender.send(printed.getvalue())


def pages() -> list[Path]:
    return [*sorted(BOOK.glob("*.md")), *sorted((BOOK / "zh").glob("*.md"))]


def main() -> None:
    from cogapp import Cog

    parser = argparse.ArgumentParser(description="Put code and outputs into the pages of the book.")
    parser.add_argument("--check", action="store_true", help="fail if a page is stale, and write nothing")
    parser.add_argument("--refresh", action="store_true", help="also run commands whose output differs by machine")
    parser.add_argument("page", type=Path, nargs="*", help="only these pages")
    args = parser.parse_args()
    if args.refresh:
        os.environ[REFRESH] = "1"
    how = ["--check", "--diff"] if args.check else ["-r"]
    names = [str(page) for page in args.page or pages()]
    calls = "from tools.book import code, exercises, output, route, sample"
    sys.exit(Cog().main(["cog", "-P", "-p", calls, "--verbosity=1", *how, *names]))


if __name__ == "__main__":
    main()
