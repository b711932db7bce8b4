"""Fixtures of the tests of `cpu.c`."""

import pytest
import torch

from tests.kernels.processors import DTYPES, PROCESSORS, need_a_compiler, pretend


@pytest.fixture(scope="module")
def needs_a_compiler():
    need_a_compiler(torch.float32)


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """Layers made in the test run the code that is made for this processor."""
    with pretend(monkeypatch, request.param):
        yield request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param
