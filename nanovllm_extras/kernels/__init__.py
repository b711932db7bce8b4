"""Optimised versions of the layers in `layers/`: C code in `cpu/`, flash-attn and Triton kernels in `cuda/`.

A fast version has the signature of the layer that it replaces and gets the same tensors. It does not use sequences,
steps or the engine. The engine also works without this folder. Read `layers/` first, then `cpu/product.h` or
`cuda/cuda_decoder_layer.py`.
"""
