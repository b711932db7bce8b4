"""Fixtures of the tests of `cpu.c`, and the tests of Triton's kernels, which need a GPU or Triton's interpreter."""

import math
import os

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.extras.kernels.processors import (
    DISTINCT,
    DTYPES,
    OF_WEIGHTS,
    WITHOUT_TILES,
    in_sweeps,
    need_a_compiler,
    pretend,
)

# These need a GPU or Triton's interpreter; test_triton_attention.py runs them in the latter, in one process.
KERNEL_TESTS = [
    "test_triton_kernels.py",
    "test_sample_kernels.py",
    "test_layer_kernels.py",
    "test_delta_kernels.py",
    "test_graph_kernels.py",
    "test_few_tokens_kernels.py",
    "test_quantised_kernels.py",
    "test_adapter_kernels.py",
]
collect_ignore = []
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.extras.kernels.faster_interpreter import make_faster

    make_faster()
elif not torch.cuda.is_available():
    collect_ignore += KERNEL_TESTS


@pytest.fixture(scope="module")
def needs_a_compiler():
    need_a_compiler(torch.float32)


@pytest.fixture(params=in_sweeps(DISTINCT))
def processor(request, monkeypatch):
    """Layers made in the test run the code that is made for this processor."""
    with pretend(monkeypatch, request.param):
        yield request.param


@pytest.fixture(params=in_sweeps(OF_WEIGHTS))
def processor_of_weights(request, monkeypatch):
    """The same for quantised weights."""
    with pretend(monkeypatch, request.param):
        yield request.param


@pytest.fixture(params=in_sweeps(WITHOUT_TILES))
def processor_without_tiles(request, monkeypatch):
    """The same for code that uses no tiles."""
    with pretend(monkeypatch, request.param):
        yield request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def _poison_new_memory(request, monkeypatch):
    """In the tests of single kernels, torch.empty gives NaN, and numbers that are no ids, not zeros by luck."""
    if request.path.name not in KERNEL_TESTS or request.path.name == "test_graph_kernels.py":
        return
    for function in (torch.empty, torch.empty_like):

        def poisoned(*args, function=function, **kwargs):
            new = function(*args, **kwargs)
            if new.dtype == torch.float8_e4m3fn:
                return new
            return new.fill_(math.nan if new.is_floating_point() else -1)

        monkeypatch.setattr(torch, function.__name__, poisoned)


@pytest.fixture(autouse=True)
def _attention_of_pytorch(request):
    """On a card, what kernels are compared with: float32 without products of three TF32 numbers, which PyTorch's fused
    attention takes there, and nothing by cuDNN, which plans for seconds at each new shape."""
    if not torch.cuda.is_available():
        yield
        return
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    is_half = parameters.get("dtype") in (torch.float16, torch.bfloat16)  # whose longest prompts need a fused one
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] if is_half else []
    with sdpa_kernel([*fused, SDPBackend.MATH]):
        yield
