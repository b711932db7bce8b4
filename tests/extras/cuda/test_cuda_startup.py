"""Which function draws the tokens on which device."""

import sys

import pytest
import torch

from nanovllm import Config
from nanovllm.extras.cuda.startup import choose_draw

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_who_draws_with_triton(monkeypatch):
    """None is PyTorch, by `draw_tokens`."""
    assert choose_draw(Config("model"), CPU) is None
    assert choose_draw(Config("model", enforce_eager=True), CPU) is None
    assert choose_draw(Config("model", enforce_eager=True), CUDA) is None
    pytest.importorskip("triton")
    assert choose_draw(Config("model"), CUDA).__module__ == "nanovllm.kernels.cuda.sample"
    with monkeypatch.context() as bare:
        bare.setenv("CC", "no-such-compiler")
        assert choose_draw(Config("model"), CUDA) is None
    monkeypatch.delitem(sys.modules, "nanovllm.kernels.cuda.sample")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_draw(Config("model"), CUDA) is None
