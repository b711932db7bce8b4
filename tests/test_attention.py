"""`TorchAttention` against the float64 reference of `attention_steps.py`, which loops over sequences and tokens."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.layers import attention
from nanovllm.layers.attention import Attention, TorchAttention
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm_testing.attention_steps import HEADS, Step, check_close, random_lens, shared_step
from nanovllm_testing.steps import batch_of


class LargestTensor(TorchDispatchMode):
    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_is_computed_without_all_of_its_scores(dtype):
    """Of 8,192 tokens they would be gigabytes."""
    num_heads, n, seq_len = 8, 256, 1024
    backend = TorchAttention(num_heads, 2, 64, 16)
    step = Step(backend, [(seq_len - n, n)], dtype=dtype)
    with LargestTensor() as largest:
        step.run(backend)
    assert 0 < largest.num_bytes < num_heads * n * seq_len * dtype.itemsize / 2


def test_decodes_on_a_gpu_are_gathered_by_the_quarter_gibibyte_at_most(monkeypatch):
    """256 of 32k tokens, all at once, would be 34 GB; 64 of 512 are one batch, since each launch costs time."""
    gathered = []

    def record(q, layer_cache, tables, seq_lens, lens, weigh):
        assert len(q) == len(tables) == len(seq_lens) == len(lens)
        gathered.append(lens)
        return q

    monkeypatch.setattr(attention, "attend_padded", record)
    monkeypatch.setattr(attention, "GATHERED_ELEMENTS", {"cpu": attention.GATHERED_ELEMENTS["cuda"]})
    backend = TorchAttention(16, 8, 128, 16)
    for num_decodes, length in [(256, 32_768), (256, 1000), (1, 1 << 20), (64, 512)]:
        q = torch.empty(num_decodes, 16, 128, dtype=torch.bfloat16)
        cache = torch.empty(2, 8, 16, 8, 128, dtype=torch.bfloat16, device="meta")  # without memory
        chunks = []
        for i in range(num_decodes):  # one of them has all of the tokens
            seq = Sequence("seq", [0] * (length - i % 7), SamplingParams())
            for _ in range(-(-length // 16)):
                seq.block_table.append(0)
            chunks.append((seq, seq.num_tokens - 1, 1))
        gathered.clear()
        backend.attend(q, cache, batch_of(chunks, 16).metadata)
        assert [n for lens in gathered for n in lens] == [seq.num_tokens for seq, _, _ in chunks], "in order"
        widest = max(len(lens) for lens in gathered)
        assert widest == 1 or widest * length * 2 * 8 * 128 * 2 <= 1 << 28
    assert len(gathered) == 1


def test_a_long_chunk_attends_in_parts(monkeypatch):
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 200)
    sizes, weigh = [], attention.softmax_attention

    def record(q, k, v, is_seen):
        sizes.append(is_seen.numel())
        return weigh(q, k, v, is_seen)

    backend = TorchAttention(4, 2, 16, 8)
    step = Step(backend, [(33, 1), (0, 30), (70, 11), (250, 3)])
    check_close(step.run(backend), step)
    check_close(backend.attend(step.q, step.layer_cache, step.batch.metadata, record), step)
    assert max(size for size in sizes if size <= 250) <= 200
    assert sizes.count(251) == sizes.count(252) == sizes.count(253) == 1, "at least one token at a time"


@pytest.mark.parametrize("scale", [None, 0.3])
def test_on_cuda_heads_are_repeated_and_cudnns_kernel_is_left_out(monkeypatch, scale):
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((6, 5), (2, 9), (2, 9)))
    is_seen = torch.rand(2, 1, 5, 9) < 0.8
    attend = F.scaled_dot_product_attention
    expected = attend(q, k, v, is_seen, scale=scale, enable_gqa=True)

    def see(q, k, v, is_seen, **options):
        assert k.shape[1] == q.shape[1]
        assert not options.get("enable_gqa")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        return attend(q, k, v, is_seen, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", see)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.testing.assert_close(attention.attend_on_cuda(q, k, v, is_seen, scale), expected)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(("block_size", "seed"), [(1, 0), (8, 1), (16, 2)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_mixed_batch_equals_the_reference(num_heads, num_kv_heads, block_size, seed):
    backend = TorchAttention(num_heads, num_kv_heads, [8, 32, 64][seed], block_size)
    step = Step(backend, random_lens(block_size, seed), seed)
    check_close(step.run(backend), step)


def test_mixed_batch_with_large_blocks_equals_the_reference():
    backend = TorchAttention(4, 2, 16, 256)
    step = Step(backend, [(255, 1), (256, 1), (0, 1), (0, 256), (250, 7), (512, 3)])
    check_close(step.run(backend), step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close_to_the_reference(dtype):
    backend = TorchAttention(4, 2, 32, 8)
    step = Step(backend, random_lens(8, 5), dtype=dtype)
    check_close(step.run(backend), step)


def test_prompt_in_chunks_gives_what_it_gives_at_once():
    """Chunks of 5, 1, 8 and 3 tokens: each attends to what the ones before it have stored."""
    backend = TorchAttention(4, 2, 16, 4)
    whole = Step(backend, [(0, 17)])
    at_once = whole.run(backend)
    check_close(at_once, whole)
    cache = torch.full_like(whole.cache, math.nan)[:, 0]
    table = whole.batch.metadata.block_tables[0].tolist()
    start = 0
    for num_new in (5, 1, 8, 3):
        seq = Sequence("seq", [0] * 17, SamplingParams())
        seq.num_computed_tokens = start
        for block_id in table:  # those of later chunks are empty so far
            seq.block_table.append(block_id)
        batch = batch_of([(seq, start, num_new)], 4)
        rows = slice(start, start + num_new)
        out = Attention(backend)(whole.q[rows], whole.k[rows], whole.v[rows], cache, batch.metadata)
        torch.testing.assert_close(out, at_once[rows], rtol=2e-6, atol=2e-6)
        start += num_new


def test_block_that_is_filled_in_this_step_can_be_shared():
    out, expected = shared_step(TorchAttention(4, 2, 16, 8))
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


def test_store_kv_writes_its_slots_and_no_other():
    backend = TorchAttention(4, 2, 8, 4)
    cache = torch.full(backend.kv_cache_shape(3, 5), math.nan)  # [2, 3, 5, 4, 2, 8]
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = [9, 4, 19]
    backend.store_kv(k, v, cache[:, 1], torch.tensor(slots, dtype=torch.int32))
    expected = torch.full_like(cache, math.nan)
    for row, slot in enumerate(slots):
        expected[0, 1, slot // 4, slot % 4] = k[row]
        expected[1, 1, slot // 4, slot % 4] = v[row]
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_attention_leaves_the_cache_of_other_tokens_alone():
    backend = TorchAttention(4, 2, 16, 8)
    step = Step(backend, random_lens(8, 3))
    before = step.cache.clone()
    step.run(backend)
    changed = (before.isnan() & ~step.cache.isnan()).any(-1).any(-1)  # [2, num_layers, num_blocks, block_size]
    slots = torch.arange(changed[0, 0].numel()).view_as(changed[0, 0])
    for part in changed:
        assert not part[0].any(), "another layer"
        assert sorted(slots[part[1]].tolist()) == sorted(step.batch.metadata.slot_mapping.tolist())
    kept = ~before.isnan()
    assert torch.equal(before[kept], step.cache[kept])
