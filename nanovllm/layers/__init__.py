"""The layers of a network. Begin with `basic.py`, then `attention.py` and `flash_attention.py`."""
