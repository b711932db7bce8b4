"""The loop, and everything that surrounds a request: its prompt, its text, its limits, its end.

Nothing here computes with tensors, and nothing below this folder imports it. Read `step()` in `engine.py` first.
"""
