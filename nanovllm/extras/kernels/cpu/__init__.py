"""All layers on CPU, in C that is compiled on first use.

`library.py` compiles and loads `cpu.c`; `attention.py` is the backend, `layers.py` the twins of single layers,
`decoder_layer.py` a whole layer in one call, `head_norms.py` and `experts.py` parts of other layers. Nothing here may
depend on the length of a batch: a token has the same bits alone, beside others and in a chunk. Read `product.h` first:
one matrix product does everything from projections to paged attention, on AMX's tiles (`tiles.h`) where the processor
has them, else on vectors (`vectors.h`).
"""
