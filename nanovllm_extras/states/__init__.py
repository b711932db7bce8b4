"""States beside pages: what models keep for each sequence, instead of K and V for each token.

`memory/slots.py` decides which sequence owns which slot: integers only. Read it first. Here, `pool.py` holds the states
as tensors, `state_layout.py` divides the memory, and `state_graphs.py` has their CUDA graphs.

With several ranks, each has its heads of every state, in the same slot as the other ranks. Rank 0 decides which
sequence owns which slot:

    state of a sequence        rank 0                rank 1
    recurrent, 4 heads         heads 0, 1            heads 2, 3
    convolution                channels of q, k and v of these heads
"""
