"""The table of all commands, and the command `nanovllm check`. Read `commands.py` first."""
