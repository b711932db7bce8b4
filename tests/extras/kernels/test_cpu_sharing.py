"""Attention on CPU of sequences that begin with the same blocks: read once for all, with the same bits."""

import dataclasses

import pytest
import torch

from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.models.masking import PLAIN, AttentionOptions
from tests.extras.attention_options import OPTIONS
from tests.extras.attention_steps import Step

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def begin_alike(step, families):
    """In a family (first, last, num_blocks), sequences first … last - 1 take the first sequence's first blocks."""
    tables = step.batch.metadata.block_tables
    for first, last, num_blocks in families:
        tables[first:last, :num_blocks] = tables[first, :num_blocks].clone()


def run_alone(backend, step, seq, options):
    """What the tokens of one sequence get in a batch of their own."""
    whole = step.batch.metadata
    start, stop = whole.cu_seqlens_q[seq].item(), whole.cu_seqlens_q[seq + 1].item()
    metadata = dataclasses.replace(
        whole,
        block_tables=whole.block_tables[seq : seq + 1].contiguous(),
        seq_lens=whole.seq_lens[seq : seq + 1].contiguous(),
        cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
    )
    return backend.attend(step.q[start:stop], step.layer_cache, metadata, options)


# Decodes and short chunks: more rows than a tile has, many lengths, some that end with the blocks they share.
LENS = [(70, 1), (64, 1), (65, 1), (200, 1), (90, 1), (96, 1), (66, 1), (67, 1), *[(68 + i, 1) for i in range(20)],
        (64, 2), (100, 3), (80, 5), (70, 40)]  # fmt: skip
EIGHT_SINKS = AttentionOptions(has_sinks=True, sinks=torch.linspace(-2, 4, 8))
FAMILIES = {
    "all": [(0, 32, 4)],
    "families": [(0, 3, 4), (3, 5, 6), (5, 7, 2), (7, 20, 1), (28, 31, 3)],
    "in families": [(0, 32, 1), (3, 5, 4), (8, 16, 3), (20, 22, 4)],
}


def sharing_blocks(test):
    """Each cache of K and V is tested with the same families and kinds of attention."""
    for names, values, ids in [
        (("block_size", "num_kv_heads"), [(16, 4), (16, 1), (32, 2)], None),
        (
            "options",
            [PLAIN, OPTIONS["wide window"], OPTIONS["soft-cap"], EIGHT_SINKS],
            ["plain", "window", "cap", "sinks"],
        ),
        ("families", FAMILIES.values(), FAMILIES),
    ]:
        test = pytest.mark.parametrize(names, values, ids=ids)(test)
    return pytest.mark.sparse(2)(test)


def check_sharing(backend, step, families, block_size, options):
    """Families are of blocks of 16 tokens."""
    step.run(backend)  # stores what is new
    begin_alike(step, [(first, last, num_blocks * 16 // block_size) for first, last, num_blocks in families])
    together = backend.attend(step.q, step.layer_cache, step.batch.metadata, options)
    assert together.isfinite().all()
    assert torch.equal(together, torch.cat([run_alone(backend, step, seq, options) for seq in range(len(LENS))]))


@sharing_blocks
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(
    processor, families, dtype, block_size, num_kv_heads, options
):
    backend = CpuAttention(8, num_kv_heads, 64, block_size, dtype)
    check_sharing(backend, Step(backend, LENS, dtype=dtype), families, block_size, options)
