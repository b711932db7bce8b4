"""`python -m labs.learn …`: the command `nanovllm learn`."""

import sys

from nanovllm_extras.cli.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command(["learn", *sys.argv[1:]]))
