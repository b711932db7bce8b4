"""Swap: the K and V of preempted sequences wait in host memory, instead of being computed again.

`memory/swap_space.py` decides which host blocks and host slots a sequence gets: integers only. Read it first.
`host_blocks.py` has the memory, and copies to and from it. `transfers.py` says when.
"""
