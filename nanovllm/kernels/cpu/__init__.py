"""All layers on CPU: `layers.py` compiles `cpu.c` on first use, and replaces PyTorch's layers by calls of it.

Nothing here may depend on the length of a batch: a token has the same bits alone, beside others and in a chunk. Read
`linear` in `cpu.c` first: one matrix product does everything from projections to paged attention.
"""
