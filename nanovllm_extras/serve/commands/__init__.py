"""The commands `nanovllm serve` and `nanovllm front`. Read `serve_command.py` first."""
