"""Swap: the K and V of preempted sequences wait in host memory, instead of being computed again.

`space.py` is the strategy that replaces `Recompute`: integers only. `host_blocks.py` has the blocks in host memory, and
copies to and from them. Read `space.py` first.
"""
