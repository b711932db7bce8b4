"""The exercises, one idea each, in the order of `catalog.py`."""
