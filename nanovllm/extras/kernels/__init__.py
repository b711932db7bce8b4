"""Fast twins of what `layers/` defines, with the same signatures: C in `cpu/`, flash-attn and Triton in `cuda/`.

A twin must not know a sequence, a step or the engine: it sees the tensors that its layer sees. The engine works without
this folder; read `layers/` first, then `cpu/product.h` or `cuda/decoder_layer.py`.
"""
