"""States beside pages: what models keep for each sequence, instead of K and V for each token.

`slots.py` decides which sequence owns which slot: integers only. `known_snapshots.py` waits for tokens that become
known later, and `drafted_slots.py` adds slots for drafts. `pool.py` holds the states as tensors, and
`state_layout.py` divides the memory. `state_graphs.py` has their CUDA graphs. Read `slots.py` first.

`state_swap.py` does the same for slots in host memory. `state_store.py` decides which snapshots the K/V store loads and
saves. With several ranks, each has its heads of every state, in the same slot as the other ranks; rank 0 decides which
sequence owns which slot:

    state of a sequence        rank 0                rank 1
    recurrent, 4 heads         heads 0, 1            heads 2, 3
    convolution                channels of q, k and v of these heads
"""
