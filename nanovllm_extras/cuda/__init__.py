"""What CUDA needs beside the kernels: graphs for decode steps, one pinned copy for a step's input, free memory,
a warm-up.

Each wraps a callable of the core's `ModelRunner`. Read `graphs.py` first.
"""
