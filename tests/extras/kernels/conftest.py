"""Fixtures of the tests of `cpu.c`, and the tests of Triton's kernels, which need a GPU or Triton's interpreter."""

import os

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.extras.kernels.processors import (
    DISTINCT,
    DTYPES,
    OF_K_AND_V,
    OF_WEIGHTS,
    WITHOUT_TILES,
    need_a_compiler,
    pretend,
)

# These need a GPU or Triton's interpreter; test_triton_attention.py runs them in the latter, every second one together.
KERNEL_TESTS = [
    "test_triton_kernels.py",
    "test_sample_kernels.py",
    "test_layer_kernels.py",
    "test_delta_kernels.py",
    "test_graph_kernels.py",
    "test_few_tokens_kernels.py",
    "test_quantised_kernels.py",
]
collect_ignore = []
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.extras.kernels.faster_interpreter import make_faster

    make_faster()
elif not torch.cuda.is_available():
    collect_ignore += KERNEL_TESTS


def in_sweeps(names):
    """Two processors are enough to find most faults: for the others only the sweep compiles."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("native", "no AMX", "AVX2"))) for name in names]


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


@pytest.fixture(params=in_sweeps(OF_K_AND_V))
def processor_of_k_and_v(request, monkeypatch):
    """The same for K and V of 8 bits."""
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
