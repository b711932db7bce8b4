"""`quantization="int8"` or `"int4"`: weights in 8 or 4 bits, so that a step reads fewer bytes.

Read `layers.py` first: what a quantised weight is, and the arithmetic. `options.py` has what a user may set, `load.py`
makes a loaded network's layers quantised. The fast versions on CPU are in `extras/kernels/cpu/cpu_quantised.py`.
"""
