"""One file for each architecture, which reads from top to bottom like the figure in its paper.

A model sees tensors and the attention metadata; it knows no sequence, no request and no scheduler. Read `qwen3.py`
first; `qwen3_config.py` reads its shape from config.json.
"""
