"""Whole blocks are copied at once, and nothing else changes. Oracle: loops over single blocks, on a copy of the tensor.

`tests/extras/swap/test_host_blocks.py` tests copies from and to host memory, and all kinds together.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 3, 8, 4


def make_cache(dtype=torch.float32, seed=0):
    """Each number in the tensor is another one."""
    backend = TorchAttention(num_heads=4, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE)
    cache = KVCache(backend, NUM_LAYERS, dtype, torch.device("cpu"))
    cache.allocate(NUM_BLOCKS)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def check(cache, copies):
    expected = cache.tensor.clone()
    for source, target in copies:
        expected[:, :, target] = cache.tensor[:, :, source]
    cache.copy_blocks(copies)
    assert torch.equal(cache.tensor, expected)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 8), (torch.bfloat16, 4), (torch.float8_e4m3fn, 3), (torch.float8_e4m3fn, 8)]
)
def test_every_dtype_is_copied_bit_by_bit(dtype, head_dim):
    backend = TorchAttention(num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=2)
    cache = KVCache(backend, 1, dtype, torch.device("cpu"))
    cache.allocate(4)
    assert cache.tensor.dtype == dtype
    bits = torch.randint(0, 256, (*cache.tensor.shape[:-1], head_dim * dtype.itemsize), dtype=torch.uint8)
    cache.tensor.view(torch.uint8).copy_(bits)
    cache.copy_blocks([(1, 4), (3, 1)])
    expected = bits.clone()
    expected[:, :, 4], expected[:, :, 1] = bits[:, :, 1], bits[:, :, 3]
    assert torch.equal(cache.tensor.view(torch.uint8), expected)


PAIRS = st.tuples(
    st.lists(st.integers(0, NUM_BLOCKS), max_size=NUM_BLOCKS + 1), st.permutations(range(NUM_BLOCKS + 1))
).map(lambda two: list(zip(*two, strict=False)))  # any sources, any different targets


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PAIRS)
def test_copies_are_those_of_a_loop(pairs):
    check(make_cache(), pairs)


def test_shapes_and_zeros():
    backend = TorchAttention(num_heads=4, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE)
    cache = KVCache(backend, NUM_LAYERS, torch.float32, torch.device("cpu"))
    assert cache.tensor.shape[2] == 1, "before `allocate` there is only the null block"
    cache.allocate(NUM_BLOCKS)
    assert cache.tensor.shape == (2, NUM_LAYERS, NUM_BLOCKS + 1, BLOCK_SIZE, 2, 8), "with the null block"
    assert cache.tensor.nbytes == (NUM_BLOCKS + 1) * cache.bytes_per_block
    assert not cache.tensor.any(), "what was never written holds no NaN"
    cache.tensor[:, :, 1] = 1.0
    cache.copy_blocks([(1, 2)])
    assert cache.tensor.sum() == 2 * cache.tensor[:, :, 1].sum()
