"""Architectures beyond Qwen3, each in its own file. Begin with `llama.py`."""
