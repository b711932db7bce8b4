"""The networks: `qwen3.py` reads from top to bottom. Other packages register more (`nanovllm/plugins.py`)."""
