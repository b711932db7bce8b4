"""The compiled latent attention against float64 loops, with NaN in every slot that holds no token, and itself."""

import pytest
import torch

from nanovllm_extras.kernels.cpu.cpu_latent_attention import CpuLatentAttention, CpuUpProjection, replace_up_projections
from nanovllm_extras.models.latent_attention import UpProjection
from nanovllm_extras.models.masking import AttentionOptions
from tests.extras.attention_steps import LatentStep, random_lens
from tests.extras.kernels.test_cpu_kernels import filled, randn

SIZES = [(4, 32, 16), (16, 64, 32), (20, 40, 24), (33, 16, 16)]  # heads, rank, the rotated key

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def make_backend(num_heads, rank, rope_dim, block_size, dtype):
    return CpuLatentAttention(num_heads, 1, rank + rope_dim, block_size, dtype, rank=rank)


def check(out, expected):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.sparse(2)
def test_mixed_batch_equals_the_reference(dtype, sizes, block_size, seed):
    backend = make_backend(*sizes, block_size, dtype)
    step = LatentStep(backend, random_lens(block_size, seed), seed, dtype)
    check(step.run(backend), step.expected)


@pytest.mark.parametrize("sizes", [(4, 32, 16), (20, 40, 24)])
@pytest.mark.parametrize("lens", [[(20, 1), (63, 1)], [(0, 37)], [(3, 5), (40, 1), (17, 30)]])
def test_each_kind_of_batch_equals_the_reference_on_each_processor(processor, dtype, lens, sizes):
    backend = make_backend(*sizes, 16, dtype)
    step = LatentStep(backend, lens, dtype=dtype)
    check(step.run(backend), step.expected)


def test_the_scale_of_the_layer_is_taken(dtype):
    backend = make_backend(4, 32, 16, 16, dtype)
    step = LatentStep(backend, [(4, 7)], dtype=dtype)
    step.run(backend)
    out = backend.attend(step.q * 2, step.layer_cache, step.batch.metadata, AttentionOptions(scale=backend.scale / 2))
    check(out, step.expected)


def test_a_token_has_the_same_bits_as_decode_and_as_part_of_a_prompt(processor, dtype):
    backend = make_backend(20, 40, 24, 16, dtype)
    whole = LatentStep(backend, [(0, 77)], dtype=dtype)
    at_once = whole.run(backend)
    decode = LatentStep(backend, [(76, 1)], dtype=dtype)
    blocks, others = decode.batch.metadata.block_tables[0].long(), whole.batch.metadata.block_tables[0].long()
    decode.layer_cache[:, blocks] = whole.layer_cache[:, others]
    assert torch.equal(backend.attend(whole.q[76:], decode.layer_cache, decode.batch.metadata)[0], at_once[76])


def test_the_cache_of_other_tokens_is_left_alone(dtype):
    backend = make_backend(4, 32, 16, 16, dtype)
    cache = torch.full(backend.kv_cache_shape(1, 3), 7.0).to(dtype)[:, 0]
    latents = randn(2, 1, 48, dtype=dtype)
    backend.store_kv(latents, latents[..., :32], cache, torch.tensor([16 + 5, 32 + 15], dtype=torch.int32))
    assert (cache == 7).sum() == cache.numel() - 2 * 48
    assert (cache[0, 1] != 7).sum() == (cache[0, 2] != 7).sum() == 48


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_up_projections_equal_the_definition_and_themselves_in_other_batches(processor, dtype, num_tokens):
    layer = filled(UpProjection(3, 24, 20, 32), dtype)
    model = torch.nn.ModuleDict({"up": layer})
    replace_up_projections(model)
    fast = model["up"]
    assert isinstance(fast, CpuUpProjection)
    for name, size in (("absorb", 24), ("values", 32)):
        x = randn(num_tokens, 3, size, dtype=dtype)
        found = getattr(fast, name)(x)
        expected = getattr(filled(UpProjection(3, 24, 20, 32), dtype).double(), name)(x.double())
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        for row in range(0, num_tokens, 23):
            assert torch.equal(getattr(fast, name)(x[row : row + 1])[0], found[row])
