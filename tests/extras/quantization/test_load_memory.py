"""Quantised weights are made, packed and loaded in little more memory than they take in the end."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.basic import Linear
from nanovllm_extras import LLM, TINY_QWEN3
from nanovllm_extras.weights import quantised_linear
from nanovllm_extras.weights.quantise import quantise
from nanovllm_extras.weights.quantised_linear import QuantisedWeight, quantise_weight
from tests.extras.quantization.packers import write
from tests.extras.quantization.test_stored_weights import FORMATS


class LiveBytes(TorchDispatchMode):
    """The memory that operations have made: `peak` is the most that was in use at a time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self.live = {key: kept for key, kept in self.live.items() if any(one() is not None for one in kept[1])}
        for tensor in tensors_in(out):
            key = memory_of(tensor)
            if key in self.live:
                self.live[key][1].append(weakref.ref(tensor))
            elif key not in given:
                self.live[key] = (tensor.untyped_storage().nbytes(), [weakref.ref(tensor)])
        self.peak = max(self.peak, sum(num_bytes for num_bytes, _ in self.live.values()))
        return out


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_quantised_a_few_rows_at_a_time(monkeypatch, bits):
    weight = randn(1024, 512)
    whole = quantise_weight(weight, bits, 128)
    monkeypatch.setattr(quantised_linear, "NUM_AT_ONCE", 1 << 14)
    with LiveBytes() as memory:
        quantised = quantise_weight(weight, bits, 128)
    assert torch.equal(quantised.q, whole.q)
    assert torch.equal(quantised.scales, whole.scales)
    result = quantised.q.nbytes + quantised.scales.nbytes
    assert result <= memory.peak < result + 32 * (1 << 14)


@pytest.mark.triton
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_packed_a_few_rows_at_a_time(monkeypatch, bits):
    cuda_quantised = pytest.importorskip("nanovllm_extras.kernels.cuda.cuda_quantised")
    weight = quantise_weight(randn(1024, 500), bits, 128)
    arguments = (weight.q, weight.scales, weight.zeros, bits, 128)
    whole = cuda_quantised.pack(*arguments)
    monkeypatch.setattr(cuda_quantised, "NUM_AT_ONCE", 1 << 14)
    with LiveBytes() as memory:
        packed = cuda_quantised.pack(*arguments)
    assert torch.equal(packed.q, whole.q)
    result = packed.q.nbytes + packed.scales.nbytes
    assert result <= memory.peak < result + 4 * (1 << 14)


class Packed(nn.Module):
    """What a backend makes of a quantised layer. `unpacked` are weights that it has been given."""

    def __init__(self, layer, unpacked):
        super().__init__()
        assert not [weight for weight in unpacked if weight() is not None], "the weight before takes memory still"
        unpacked.append(weakref.ref(layer.quantised))
        assert isinstance(layer.quantised, QuantisedWeight)
        self.parts = getattr(layer, "parts", None)


def test_each_layer_is_packed_before_the_next_is_quantised():
    network, unpacked = nn.Sequential(*(Linear(32, 16) for _ in range(3))), []
    quantise(network, "int4", finish=lambda layer: Packed(layer, unpacked))
    assert [type(layer) for layer in network] == [Packed] * 3


@pytest.mark.parametrize(("name", "enforce_eager"), [("awq", False), ("int8", False), ("int8", True)])
def test_a_backend_packs_layers_while_they_are_loaded(monkeypatch, tmp_path, name, enforce_eager):
    """Unless all layers are to be PyTorch's."""
    folder, options, unpacked = TINY_QWEN3, {"quantization": name}, []
    if name == "awq":
        folder, options = tmp_path / "model", {}
        write(folder, *FORMATS["awq"])

    def pack(self, layer):
        packed = Packed(layer, unpacked)
        del layer.quantised
        return packed

    monkeypatch.setattr(TorchAttention, "pack_quantised", pack, raising=False)
    llm = LLM(
        folder, attention_backend="torch", enforce_eager=enforce_eager, num_kv_blocks=8, dtype="float32", **options
    )
    layers = [type(layer) for layer in llm.engine.runner.model.modules()]
    assert layers.count(Packed) == len(unpacked)
    assert (len(unpacked) > 4) == (not enforce_eager)
