"""`python -m nanovllm_extras COMMAND …`: the command `nanovllm` of an installed package."""

import sys

from nanovllm_extras.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
