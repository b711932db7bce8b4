"""One file for each architecture, which reads from top to bottom like the figure in its paper.

A model sees tensors and the attention metadata; it knows no sequence, no request and no scheduler. Read `qwen3.py`
first, then `decoder.py`, which all share; `registry.py` lists the architectures. All but Qwen3 may be deleted;
`kernels/` needs `masking.py`.
"""
