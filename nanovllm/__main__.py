"""`nanovllm COMMAND …`, or `python -m nanovllm COMMAND …`: all commands are extras (`extras/commands.py`)."""

import sys

from nanovllm.checks import extra


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (by default those of the process) begin with, and return its exit status."""
    with extra("extras/commands.py", "a command"):
        from nanovllm.extras import commands
    return commands.main(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
