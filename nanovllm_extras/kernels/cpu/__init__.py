"""Fast CPU versions of all layers, in C code that is compiled on first use.

`library.py` compiles and loads `cpu.c`. `cpu_attention.py` is the attention backend. `cpu_layers.py` has the fast
versions of single layers, `cpu_decoder_layer.py` computes a whole layer in one call, and `experts.py`
computes a part of other layers. No result may depend on the length of a batch: a token has the same bits by
itself, in a batch and in a chunk. Read `product.h` first: one matrix product serves projections as well as paged
attention. It runs on AMX's tiles (`tiles.h`) if the processor has them, otherwise on vectors (`vectors.h`).
"""
