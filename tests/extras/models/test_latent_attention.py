"""Attention over latents in PyTorch, against the float64 reference; its cache; the backends that serve it.

That it is the attention of DeepSeek, also with a cache of 8 bits: `test_architectures.py`, `test_eight_bit_caches.py`.
"""

import pytest
import torch

from nanovllm.kv_cache import KVCache
from nanovllm_extras.execution.choices import LATENT_BACKENDS, select_backend
from nanovllm_extras.kernels.latent_backend import TorchLatentAttention
from tests.extras.attention_steps import LatentStep, random_lens
from tests.extras.swap.test_host_blocks import Cache

HEADS, RANK, ROPE_DIM = 3, 12, 4
HEAD_DIM = RANK + ROPE_DIM


def make_backend(block_size=4, **options):
    return TorchLatentAttention(HEADS, 1, HEAD_DIM, block_size, rank=RANK, **options)


@pytest.mark.parametrize(("block_size", "seed"), [(1, 0), (4, 1), (16, 2)])
def test_mixed_batch_equals_the_reference(block_size, seed):
    backend = make_backend(block_size)
    step = LatentStep(backend, random_lens(block_size, seed), seed)
    out = step.run(backend)
    assert out.shape == (len(step.q), HEADS, RANK)
    torch.testing.assert_close(out.double(), step.expected, rtol=2e-6, atol=2e-6)


# ---- the cache has one part


def test_a_slot_holds_one_latent():
    backend = make_backend(block_size=4)
    cache = KVCache(backend, 3, torch.float32, torch.device("cpu"))
    cache.allocate(6)
    assert cache.tensor.shape == (1, 3, 7, 4, 1, HEAD_DIM)
    assert cache.bytes_per_block == 3 * 4 * HEAD_DIM * 4
    assert cache.tensor.nbytes == 7 * cache.bytes_per_block
    assert Cache(backend, 3, torch.float32, 6, 2).host_blocks.tensor.nbytes == 2 * cache.bytes_per_block


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
