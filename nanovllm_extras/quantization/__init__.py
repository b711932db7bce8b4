"""Quantised weights of 8 or 4 bits (`quantization="int8"` or `"int4"`), so that a step reads fewer bytes.

Read `quantised_linear.py` first: it defines a quantised weight and the arithmetic. `quantization_options.py` has the
user's options, and `quantise.py` quantises the layers of a loaded network. The fast versions are in
`nanovllm_extras/kernels/cpu/cpu_quantised.py` and `nanovllm_extras/kernels/cuda/quantised_layers.py`.
"""
