"""A step as tensors: the runner with all options, and the objects that it holds.

Read `full_runner.py` first. `layout.py` says what the layers of a model keep, and `transfers.py` carries out a step's
copies. `choices.py` chooses the attention backend. What CUDA needs beside the kernels is in `cuda_startup.py` (the
start), `cuda_memory.py` (free memory), `cuda_warm_up.py` and `step_graphs.py` (graphs of whole steps of decodes).
"""
