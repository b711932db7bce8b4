"""Which sequence owns which memory: blocks, slots of recurrent states, and what waits in host memory.

`block_manager.py` has the engine's block manager, and the other files what it is made of: `kinds.py` (what the layers
of a group keep), `prefix_cache.py`, `slots.py` (recurrent states), `swap_space.py` (preempted sequences in host
memory), `store_link.py` (what a K/V store loads and saves). No file of this folder has tensors of the model.
"""
