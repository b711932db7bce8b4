"""States beside pages: what models keep for each sequence, instead of K and V for each token.

`slots.py` decides which sequence owns which slot: integers only. `known_snapshots.py` waits for tokens that become
known later, and `drafted_slots.py` adds slots for drafts. `pool.py` holds the states as tensors. `state_runner.py` runs
models that have states, and refuses options that do not work with them. `state_graphs.py` has their CUDA graphs. Read
`slots.py` first.

`state_swap.py` does the same for slots in host memory, and `state_ranks.py` is for several ranks. `state_store.py`
decides which snapshots the K/V store loads and saves.
"""
