"""The layers of a network. Begin with `attention.py`, then `flash_attention.py`."""
