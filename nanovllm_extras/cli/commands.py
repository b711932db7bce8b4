"""Run the commands of `nanovllm COMMAND …`, or `python -m nanovllm_extras COMMAND …`.

The module of a command is imported only when the command is run, so that the other commands do not need its packages.
The module has a function `main(arguments: list[str]) -> int | None`, which returns the exit status. If the packages of
the module are missing, its options can still be listed (`--help`), and a wrong command line is still an error.
"""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from nanovllm_extras.cli.checkout import describe_checkout
from nanovllm_extras.machine.printing import escape_unprintable, flush_output, say


class Command(NamedTuple):
    """The module of a command, the packages that it needs, and a line of help."""

    module: str
    extra: str
    """The extra of pyproject.toml that installs the packages of the module."""
    help: str
    options: str = ""
    """The module whose `make_parser()` needs no extra; empty if `module` needs none."""


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "nanovllm_extras.serve.commands.serve_command",
        "serve",
        "serve a model over HTTP, with OpenAI's API",
        "nanovllm_extras.serve.serve_settings",
    ),
    "front": Command(
        "nanovllm_extras.serve.commands.front_command",
        "front",
        "send requests to a prefill engine, then to a decode engine",
        "nanovllm_extras.serve.commands.front_options",
    ),
    "run-batch": Command(
        "nanovllm_extras.serve.batch.command",
        "batch",
        "answer files of requests, on one machine or with Ray",
        "nanovllm_extras.serve.batch.batch_options",
    ),
    "chat": Command(
        "nanovllm_extras.terminal.chat_command",
        "chat",
        "talk to a model in the terminal",
        "nanovllm_extras.terminal.chat_arguments",
    ),
    "bench serve": Command(
        "nanovllm_extras.bench.benchmark",
        "bench",
        "measure an OpenAI-compatible server under load",
        "nanovllm_extras.bench.bench_options",
    ),
    "bench compare": Command(
        "nanovllm_extras.bench.compare", "", "measure your own scheduler, cache or kernel against the engine"
    ),
    "check": Command(
        "nanovllm_extras.cli.check_command", "", "check what computes on this machine, and what is missing"
    ),
    "learn": Command(
        "labs.learn.learn_command",
        "learn",
        "exercises: write an engine's parts, with a checker",
        "labs.learn.learn_options",
    ),
    "test": Command(
        "nanovllm_testing.command", "", "find faults in a scheduler, a cache, a backend or a sampler of your own"
    ),
    "view": Command("nanovllm_extras.what_if.view_command", "", "replay a recording of LLM(…, trace=…) in a browser"),
    "what-if": Command(
        "nanovllm_extras.what_if.command", "", "run the scheduler again on a recording with other options"
    ),
}
"""Name of a command, one or two words -> the command. `labs` is not installed: it is found in a checkout."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command of this process. Returns the exit status."""
    return run_command(sys.argv[1:] if arguments is None else arguments)


def run_command(arguments: list[str]) -> int:
    """Run the command that `arguments` begin with, and return its exit status.

    If the first argument has a space, all arguments are questions: `nanovllm "What is a block table?"`. The status is 1
    if the output cannot be written. A closed pipe ends the command without a message.
    """
    escape_unprintable()
    lost: OSError | None = None
    status = 1
    try:
        status = run_words(arguments)
    except OSError as error:
        lost = flush_output()
        if lost is None and not isinstance(error, BrokenPipeError):  # it is not about the output
            raise
    finally:
        lost = lost or flush_output()
        if lost is not None and not isinstance(lost, BrokenPipeError):
            say(f"nanovllm: the output cannot be written: {lost.strerror}", sys.stderr)
    return status if lost is None else 1


def run_words(arguments: list[str]) -> int:
    """Run the command that `arguments` begin with, and return its exit status."""
    for name, command in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            return run(name, command, arguments[len(words) :])
    if arguments and " " in arguments[0]:
        return importlib.import_module("nanovllm.__main__").ask(arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments == ["--version"]:
        print(describe_version())
        return 0
    if arguments:
        print(f"nanovllm: unknown command {arguments[0]!r}\n", file=sys.stderr)
    print(usage(), file=sys.stderr)
    return 2


def run(name: str, command: Command, arguments: list[str]) -> int:
    """Import and run a command, and return its exit status: 1 if a package or the checkout is missing.

    If a package is missing, the options are parsed all the same: `--help` and a wrong option exit here.
    """
    if command.module.startswith("labs.") and not find_labs():
        print(
            f"nanovllm {name}: the exercises are part of a checkout, and not installed. {describe_checkout()} Then run "
            f"`nanovllm {name}` or `python -m labs.{name}` in its folder",
            file=sys.stderr,
        )
        return 1
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in (
            "nanovllm",
            "nanovllm_extras",
            "nanovllm_testing",
            "labs",
        ):
            raise
        if command.options:
            importlib.import_module(command.options).make_parser().parse_args(arguments)
        print(f"nanovllm {name} needs the package {error.name}: run {install_command(command.extra)}", file=sys.stderr)
        return 1
    return module.main(arguments) or 0


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra where this Python finds them."""
    return f"{sys.executable} -m pip install 'nanovllm[{extra}]'"


def describe_version() -> str:
    """Return the name and the version of the installed package."""
    try:
        return f"nanovllm {version('nanovllm')}"
    except PackageNotFoundError:
        return "nanovllm, a folder of sources that is not installed"


def find_labs() -> bool:
    """Let Python import `labs` from the checkout that holds this package, or from the current folder.

    Returns False if neither has it.
    """
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / "labs" / "learn" / "learn_command.py").exists():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return True
    return False


def usage() -> str:
    """Return the help text: a line for each command."""
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: nanovllm COMMAND …",
            '       nanovllm "What is a block table?"  (the bundled model answers)',
            "",
            *lines,
            "",
            "nanovllm COMMAND --help lists a command's options, and nanovllm --version prints the version.",
        ]
    )
