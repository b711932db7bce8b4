"""How long OpenMP's threads spin while they wait for the next operation of PyTorch.

This module is imported before torch, if possible, because libgomp reads the setting once, when torch loads it. By
default a waiting thread spins for up to 4 ms. If another process needs its core, each operation then waits for a thread
that is not running: two engines with PyTorch's layers on the same two cores took 4 to 20 times as long as one.
"""

import os
import sys

if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "2000"  # about 30 microseconds
    import torch  # noqa: F401

    del os.environ["GOMP_SPINCOUNT"]  # programs that this process starts decide for themselves
