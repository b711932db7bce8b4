"""Attention over latents equals attention over the K and V of every head, which are computed from the latents here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.basic import ApplyRotary
from nanovllm_extras.execution.choices import LATENT_BACKENDS, select_backend
from nanovllm_extras.kernels.fp8_kv import with_fp8_cache
from nanovllm_extras.kernels.int8_kv import to_bytes
from nanovllm_extras.kernels.latent_backend import Int8LatentAttention, TorchLatentAttention
from nanovllm_extras.models.latent_attention import UpProjection, deinterleave
from nanovllm_extras.records.moves import Moves
from tests.extras.attention_steps import LatentStep, attend_with_loops, random_lens
from tests.extras.swap.test_host_blocks import Cache

HEADS, RANK, ROPE_DIM, KEY_DIM, VALUE_DIM = 3, 12, 4, 6, 5
HEAD_DIM = RANK + ROPE_DIM


def make_backend(block_size=4, **options):
    return TorchLatentAttention(HEADS, 1, HEAD_DIM, block_size, rank=RANK, **options)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batch_equals_the_reference(block_size, seed):
    backend = make_backend(block_size)
    step = LatentStep(backend, random_lens(block_size, seed), seed)
    out = step.run(backend)
    assert out.shape == (len(step.q), HEADS, RANK)
    torch.testing.assert_close(out.double(), step.expected, rtol=2e-6, atol=2e-6)


def test_absorbed_weights_give_what_keys_and_values_of_each_head_would():
    """The whole way: q takes up W_k, W_v comes after the sum. The reference has K and V of every head, in float64."""
    up = UpProjection(HEADS, KEY_DIM, VALUE_DIM, RANK).requires_grad_(False)
    up.weight.copy_(normal(*up.weight.shape))
    seq_len, backend = 9, make_backend()
    q, q_rope = normal(seq_len, HEADS, KEY_DIM, seed=1), normal(seq_len, HEADS, ROPE_DIM, seed=2)
    latents = normal(seq_len, 1, HEAD_DIM, seed=3)
    step = LatentStep(backend, [(0, seq_len)])
    absorbed = torch.cat((up.absorb(q), q_rope), -1)
    attention = Attention(backend)
    out = attention(absorbed, latents, latents[..., :RANK], step.layer_cache, step.batch.metadata)

    keys_and_values = (latents[:, 0, :RANK].double() @ up.weight.double().T).unflatten(-1, (HEADS, -1))
    shared = latents[..., RANK:].double().expand(-1, HEADS, -1)
    k = torch.cat((keys_and_values[..., :KEY_DIM], shared), -1)
    v = keys_and_values[..., KEY_DIM:]
    scale = math.sqrt(k.shape[-1] / HEAD_DIM)  # the loops divide by the root of their keys' length, not of the slot's
    expected = attend_with_loops(torch.cat((q, q_rope), -1) * scale, k, v)
    torch.testing.assert_close(up.values(out).double(), expected, rtol=1e-5, atol=1e-5)


def test_interleaved_pairs_are_rotated():
    """Products of rotated queries and keys are those of pairs (0, 1), (2, 3), … as complex numbers."""
    q, k, angles = normal(5, 2, 8, seed=1), normal(5, 1, 8, seed=2), normal(5, 1, 4, seed=3) * 3
    ours = [ApplyRotary()(deinterleave(x), angles.cos(), angles.sin()) for x in (q, k)]
    turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    theirs = [torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turn) for x in (q, k)]
    products = [(a * b.expand_as(a)).flatten(2).sum(-1) for a, b in (ours, theirs)]
    torch.testing.assert_close(products[0].double(), products[1], rtol=1e-5, atol=1e-5)


# ---- the cache has one part


def test_a_slot_holds_one_latent():
    backend = make_backend(block_size=4)
    cache = KVCache(backend, 3, torch.float32, torch.device("cpu"))
    cache.allocate(6)
    assert cache.tensor.shape == (1, 3, 7, 4, 1, HEAD_DIM)
    assert cache.bytes_per_block == 3 * 4 * HEAD_DIM * 4
    assert cache.tensor.nbytes == 7 * cache.bytes_per_block
    assert Cache(backend, 3, torch.float32, 6, 2).host_blocks.tensor.nbytes == 2 * cache.bytes_per_block


BLOCKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=4, unique_by=lambda pair: pair[1])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(outs=BLOCKS, ins=BLOCKS, copies=BLOCKS, dtype=st.sampled_from([torch.bfloat16, torch.float8_e4m3fn]))
def test_blocks_of_one_part_are_moved_bit_by_bit(outs, ins, copies, dtype):
    """Out, in and on the device, against loops over blocks; the tables are those of test_host_blocks.py."""
    cache = Cache(make_backend(), 2, dtype, 5, 4)
    for seed, tensor in enumerate((cache.tensor, cache.host_blocks.tensor)):
        generator = torch.Generator().manual_seed(seed)
        words = tensor.view(torch.uint8)
        words.copy_(torch.randint(0, 256, words.shape, generator=generator, dtype=torch.uint8))
    device = cache.tensor.view(torch.uint8).clone().movedim(2, 0)  # [num_blocks + 1, …], as the host's
    host = cache.host_blocks.tensor.view(torch.uint8).clone()
    ins = [(target, source) for source, target in ins]  # (host, device)
    ins = list({device_block: (host_block, device_block) for host_block, device_block in ins}.values())
    cache.copy_blocks(Moves(copies, swap_outs=outs, swap_ins=ins))
    for source_tensor, target_tensor, pairs in ((device, host, outs), (host, device, ins), (device, device, copies)):
        read = source_tensor.clone()
        for source, target in pairs:
            target_tensor[target] = read[source]
    assert torch.equal(cache.tensor.view(torch.uint8), device.movedim(0, 2))
    assert torch.equal(cache.host_blocks.tensor.view(torch.uint8), host)


def test_fp8_cache_is_close():
    step = LatentStep(make_backend(), [(5, 1), (3, 6)])
    exact, step.layer_cache = step.run(make_backend()), step.layer_cache.to(torch.float8_e4m3fn)
    fp8_backend = with_fp8_cache(TorchLatentAttention)(HEADS, 1, HEAD_DIM, 4, rank=RANK, kv_cache_dtype="fp8")
    error = (step.run(fp8_backend) - exact).norm() / exact.norm()
    assert 0 < error < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_an_int8_cache_is_one_of_rounded_latents(seed):
    """As if latents had come rounded, each part with its own scale, to a cache in float32. A key may be much larger."""
    plain, sizes = make_backend(), (RANK, ROPE_DIM)
    int8 = Int8LatentAttention(HEADS, 1, HEAD_DIM, 4, rank=RANK, kv_cache_dtype="int8")
    step = LatentStep(plain, random_lens(4, seed), seed)
    larger = torch.cat((torch.ones(RANK), torch.full((ROPE_DIM,), 50.0)))
    k, old = step.k * larger, step.layer_cache * larger

    def rounded(x):
        scales = [part.abs().amax(-1, keepdim=True) / 127 for part in x.split(sizes, -1)]
        return torch.cat([torch.round(part / s) * s for part, s in zip(x.split(sizes, -1), scales, strict=True)], -1)

    cache = torch.cat([to_bytes(part) for part in old.split(sizes, -1)], -1)
    expected = Attention(plain)(step.q, rounded(k), rounded(k)[..., :RANK], rounded(old), step.batch.metadata)
    found = Attention(int8)(step.q, k, k[..., :RANK], cache, step.batch.metadata)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- which backends serve it


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["flash_attn", "triton"])
def test_a_backend_without_it_says_so(name):
    with pytest.raises(ValueError, match=f"not {name}: it has no latent attention.*take attention_backend='torch'"):
        select_backend(name, CPU, torch.float32, 48, paths=LATENT_BACKENDS)


def test_auto_passes_by_what_does_not_serve_it():
    backend_class, reasons = select_backend("auto", CPU, torch.float32, 50, paths=LATENT_BACKENDS)
    assert backend_class is TorchLatentAttention
    assert "not flash_attn: it has no latent attention; not cpu: kv_lora_rank + qk_rope_head_dim must be" in reasons
