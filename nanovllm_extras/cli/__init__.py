"""The commands `nanovllm serve`, `front` and `check`, and the table of all commands. Read `commands.py` first."""
