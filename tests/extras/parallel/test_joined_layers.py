"""A decoder layer whose ranks have a share of its weights each: `CpuDecoderLayer.join`."""

import pytest
import torch
from torch import nn

from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import fuse_layers
from nanovllm_extras.kernels.cpu.cpu_layers import replace_layers
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.rope import Rope, ScaledRotary
from nanovllm_extras.parallel.communicator import CommunicationError
from tests.extras.attention_steps import Step
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.kernels.test_cpu_kernels import filled, randn
from tests.extras.parallel.ranks import threads_of

LENS = [(40, 1), (15, 1), (0, 100)]


class Summed(nn.Module):
    def __init__(self, product, ranks):
        super().__init__()
        self.product, self.ranks = product, ranks

    def forward(self, x):
        return self.ranks.all_reduce(self.product(x))


def make_layer(num_heads, num_kv_heads, intermediate_size, dtype, seed=0):
    config = NetworkConfig(64, 96, intermediate_size, 1, num_heads, num_kv_heads, head_dim=32)
    backend = CpuAttention(num_heads, num_kv_heads, 32, 16, dtype)
    layer = filled(Qwen3DecoderLayer(config, backend), dtype, seed)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):  # as of all ranks
        norm.weight.data = randn(96, dtype=dtype)
    return layer, backend


def fast(layer, backend, dtype):
    model = nn.ModuleDict({"layer": layer})
    replace_layers(model, dtype)
    parts = model["layer"]
    fuse_layers(model, backend)
    return parts, model["layer"]


def run_layer(layer, backend, dtype):
    step = Step(backend, LENS, dtype=dtype)
    x = randn(len(step.q), 96, dtype=dtype)
    cos, sin = ScaledRotary(32, Rope(), 1024)(torch.arange(len(x)), dtype)
    return layer(x, cos, sin, step.cache[:, 1], step.batch.metadata)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3), (torch.bfloat16, 2)])
def test_a_joined_layer_has_the_bits_of_its_parts_with_all_reduces_between(dtype, size):
    need_a_compiler(dtype)

    def check(ranks):
        layer, backend = make_layer(4, 2, 176, dtype, seed=ranks.rank)
        parts, fused = fast(layer, backend, dtype)
        fused.join(ranks)
        joined = run_layer(fused, backend, dtype)
        parts.self_attn.o_proj = Summed(parts.self_attn.o_proj, ranks)
        parts.mlp.down_proj = Summed(parts.mlp.down_proj, ranks)
        assert torch.equal(joined, run_layer(parts, backend, dtype))
        assert joined.isfinite().all()
        return joined

    with threads_of("shared memory", size, dtype) as (_, run):
        results = run(check)
    assert all(torch.equal(one, results[0]) for one in results)


def test_a_layer_whose_peer_is_gone_raises():
    need_a_compiler(torch.float32)
    layer, backend = make_layer(4, 2, 176, torch.float32)
    fused = fast(layer, backend, torch.float32)[1]
    with threads_of("shared memory", 2) as (together, _):
        fused.join(together[0])
        together[1].close()
        for _ in range(2):
            with pytest.raises(CommunicationError, match="rank 0 of 2 lost a peer"):
                run_layer(fused, backend, torch.float32)
