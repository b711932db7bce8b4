"""The classes that kernels know by name are there, and only they have fast versions."""

import importlib

import pytest
import torch

from nanovllm.layers.basic import Linear, RMSNorm
from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cpu.cpu_layers import CLAMPED_SWIGLU, NORMS, ROUTER, SIGMOID_ROUTER, replace_layers
from nanovllm_extras.kernels.cpu.experts import EXPERTS
from nanovllm_extras.kernels.dense_layers import DENSE_LAYERS


class OtherNorm(RMSNorm):
    """Computes otherwise, as far as a kernel can know."""


class OtherLinear(Linear):
    """As `OtherNorm`."""


NAMES = [*DENSE_LAYERS, *NORMS, EXPERTS, ROUTER, SIGMOID_ROUTER, CLAMPED_SWIGLU]


def test_the_classes_are_there():
    for name in NAMES:
        module, _, class_name = name.rpartition(".")
        found = getattr(importlib.import_module(module), class_name)
        assert issubclass(found, torch.nn.Module), name
        assert is_one(object.__new__(found), name)


@pytest.mark.usefixtures("needs_a_compiler")
def test_a_class_that_no_kernel_knows_is_left_alone():
    model = torch.nn.Sequential(OtherNorm(32, 1e-6), OtherLinear(32, 32), Linear(32, 32)).requires_grad_(False)
    replace_layers(model, torch.float32)
    assert [type(layer).__name__ for layer in model] == ["OtherNorm", "OtherLinear", "CpuLinear"]
