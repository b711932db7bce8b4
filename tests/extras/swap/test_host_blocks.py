"""Whole blocks are copied out, in, and on the device, each kind at once, in this order, and nothing else changes.

Oracle: loops over single blocks, on copies of both tensors.
"""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.execution.transfers import Transfers
from nanovllm_extras.kv_store.host_blocks import HostBlocks
from nanovllm_extras.records.moves import Moves

NUM_LAYERS, NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 3, 8, 6, 4
KINDS = ("swap_outs", "swap_ins", "copies")


class Cache:
    """A KV cache, and the blocks in host memory of its `Transfers`."""

    def __init__(self, backend, num_layers, dtype, num_blocks, num_host_blocks):
        kv_cache = KVCache(backend, num_layers, dtype, torch.device("cpu"))
        kv_cache.allocate(num_blocks)
        transfers = Transfers([kv_cache], swap_space_bytes=num_host_blocks * kv_cache.bytes_per_block)
        transfers.allocate()
        self.tensor, (self.host_blocks,), self.copy_blocks = kv_cache.tensor, transfers.host_blocks, transfers.before


def make_cache(dtype=torch.float32):
    """Each number in both tensors is another one."""
    backend = TorchAttention(num_heads=4, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE)
    cache = Cache(backend, NUM_LAYERS, dtype, NUM_BLOCKS, NUM_HOST_BLOCKS)
    generator = torch.Generator().manual_seed(0)
    for tensor in (cache.tensor, cache.host_blocks.tensor):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def expect(cache, moves):
    """(device, host) after the moves, block by block; both in the order of the device's tensor."""
    device, host = cache.tensor.clone(), cache.host_blocks.tensor.movedim(0, 2).clone()
    for kind, source_tensor, target_tensor in zip(KINDS, (device, host, device), (host, device, device), strict=True):
        read = {source: source_tensor[:, :, source].clone() for source, _ in pairs_of(moves, kind)}
        for source, target in pairs_of(moves, kind):
            target_tensor[:, :, target] = read[source]
    return device, host


def moves_of(copies=(), swap_outs=(), swap_ins=()):
    return Moves(copies, swap_outs=swap_outs, swap_ins=swap_ins)


def pairs_of(moves, kind):
    return moves if kind == "copies" else getattr(moves, kind)


def check(cache, moves):
    device, host = expect(cache, moves)
    cache.copy_blocks(moves)
    assert torch.equal(cache.tensor, device)
    assert torch.equal(cache.host_blocks.tensor.movedim(0, 2), host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [3, 8])
def test_every_dtype_is_moved_bit_by_bit(dtype, head_dim):
    backend = TorchAttention(num_heads=2, num_kv_heads=2, head_dim=head_dim, block_size=2)
    cache = Cache(backend, 1, dtype, 4, 2)
    bits = torch.randint(0, 256, (*cache.tensor.shape[:-1], head_dim * dtype.itemsize), dtype=torch.uint8)
    cache.tensor.view(torch.uint8).copy_(bits)
    cache.copy_blocks(moves_of(swap_outs=[(1, 1)], copies=[(3, 1)]))
    cache.copy_blocks(moves_of(swap_ins=[(1, 4)]))
    expected = bits.clone()
    expected[:, :, 4], expected[:, :, 1] = bits[:, :, 1], bits[:, :, 3]
    assert torch.equal(cache.tensor.view(torch.uint8), expected)


class Stream:
    def __init__(self, events):
        self.events = events

    def wait_stream(self, other):
        self.events.append("wait")


class CopyCheck(TorchDispatchMode):
    """What is copied between host and device is one piece of memory on both sides: else the host would wait for it."""

    num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.num_copies += 1
            assert args[2], "the host need not wait"
            assert args[0].is_contiguous()
            assert args[1].is_contiguous()
        return func(*args, **(kwargs or {}))


def test_swaps_beside_the_other_work(monkeypatch):
    """As on CUDA, where a stream of their own makes them: the same blocks, one copy for each, and waits around them."""
    events, cache = [], make_cache()
    cache.host_blocks._stream, check_copies = Stream(events), CopyCheck()

    @contextlib.contextmanager
    def stream(which):
        assert which is cache.host_blocks._stream
        events.append("copies")
        with check_copies:
            yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(events))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: events.append("kept"))
    check(cache, moves_of(swap_outs=[(3, 5), (1, 0), (8, 2)], swap_ins=[(5, 7), (4, 1)], copies=[(7, 2)]))
    assert check_copies.num_copies == 5
    assert events == ["wait", "copies", "kept", "wait", "copies", "wait"]


def pairs(num_sources, num_targets):
    """Any sources, any different targets."""
    sources = st.lists(st.integers(0, num_sources - 1), max_size=num_targets)
    return st.tuples(sources, st.permutations(range(num_targets))).map(lambda two: list(zip(*two, strict=False)))


MOVES = st.builds(
    moves_of,
    swap_outs=pairs(NUM_BLOCKS + 1, NUM_HOST_BLOCKS),
    swap_ins=pairs(NUM_HOST_BLOCKS, NUM_BLOCKS + 1),
    copies=pairs(NUM_BLOCKS + 1, NUM_BLOCKS + 1),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MOVES)
def test_all_kinds_together(moves):
    check(make_cache(), moves)


def test_shapes():
    cache = make_cache(torch.bfloat16)
    assert cache.tensor.shape == (2, NUM_LAYERS, NUM_BLOCKS + 1, BLOCK_SIZE, 2, 8), "with the null block"
    assert cache.host_blocks.tensor.shape == (NUM_HOST_BLOCKS, 2, NUM_LAYERS, BLOCK_SIZE, 2, 8)
    assert HostBlocks(cache.tensor, 0).tensor.numel() == 0, "no swap space costs nothing"


def test_swap_space_is_whole_blocks():
    backend = TorchAttention(num_heads=4, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE)
    cache = KVCache(backend, NUM_LAYERS, torch.float32, torch.device("cpu"))
    size = cache.bytes_per_block
    sizes = [
        Transfers([cache], swap_space_bytes=num_bytes).num_swap_blocks for num_bytes in (size, 2 * size - 1, 10 * size)
    ]
    assert sizes == [1, 1, 10]
    with pytest.raises(ValueError, match=f"swap_space_bytes must be >= {size}, one block, got {size - 1}"):
        Transfers([cache], swap_space_bytes=size - 1)
