"""Where the tests of Triton's kernels run: on a CUDA device, or on CPU under TRITON_INTERPRET=1.

`test_triton_attention.py` sets the latter for a process that runs these tests. They are collected only there, and
`conftest.py` fills memory that no kernel has written with NaN.
"""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
FP8 = torch.float8_e4m3fn
# the interpreter rounds to bfloat16 otherwise, and its product of bfloat16 matrices is wrong
HALF = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALF]


def only_on_gpu(test):
    return pytest.mark.skipif(IS_INTERPRETED, reason="needs a CUDA device")(test)


def every_second_case(cases):
    """As `every_second`, for parameters of several names."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (i % 2)) for i, case in enumerate(cases)]


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)
