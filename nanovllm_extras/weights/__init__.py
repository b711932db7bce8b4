"""From a checkpoint to a network with weights, which may be quantised to 8 or 4 bits.

`checkpoint.py` finds the folder and reads its config, and `load_model.py` loads the weights. `quantised_linear.py`
defines a quantised weight and the arithmetic, so that a step reads fewer bytes (`quantization="int8"` or `"int4"`):
`quantise.py` quantises the layers of a loaded network, and `stored.py` and `gguf.py` load checkpoints that are
quantised already. The fast versions are in `kernels/cpu/cpu_quantised.py` and `kernels/cuda/quantised_layers.py`.
"""
