"""A step's arrays, against a loop over its tokens in plain Python and against the example in `batch.py`'s docstring."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.batch import build_batch, largest_batch
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm_testing.steps import step_of


def make_seq(token_ids, num_computed_tokens, block_table, temperature=1.0):
    seq = Sequence("seq", token_ids, SamplingParams(temperature=temperature))
    seq.num_computed_tokens = num_computed_tokens
    for block_id in block_table:
        seq.block_table.append(block_id)
    return seq


def schedule(chunks):
    """What the scheduler says of `chunks`, which have the decodes in front."""
    return step_of([(seq, seq.num_computed_tokens, num_new_tokens) for seq, num_new_tokens in chunks])


def expected_batch(chunks, block_size):
    """The same by name, as lists: one token after the other."""
    want = {name: [] for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "logits_indices")}
    want |= {"temperatures": [], "block_tables": [], "cu_seqlens_q": [0]}
    want |= {"prefill_cu_seqlens_q": [0], "prefill_cu_seqlens_k": [0]}
    want |= {"max_seqlen_q": 0, "max_seqlen_k": 0, "num_decodes": 0, "num_prefix_tokens": 0}
    width = max(len(seq.block_table) for seq, _ in chunks)
    for seq, num_new_tokens in chunks:
        tokens, table = seq.token_ids.tolist(), seq.block_table.tolist()
        stop = seq.num_computed_tokens + num_new_tokens
        for position in range(seq.num_computed_tokens, stop):
            want["input_ids"].append(tokens[position])
            want["positions"].append(position)
            want["slot_mapping"].append(table[position // block_size] * block_size + position % block_size)
        want["block_tables"].append(table + [0] * (width - len(table)))
        want["seq_lens"].append(stop)
        want["cu_seqlens_q"].append(len(want["input_ids"]))
        if num_new_tokens == 1:
            want["num_decodes"] += 1
        else:
            want["prefill_cu_seqlens_q"].append(want["prefill_cu_seqlens_q"][-1] + num_new_tokens)
            want["prefill_cu_seqlens_k"].append(want["prefill_cu_seqlens_k"][-1] + stop)
            want["max_seqlen_q"] = max(want["max_seqlen_q"], num_new_tokens)
            want["max_seqlen_k"] = max(want["max_seqlen_k"], stop)
            want["num_prefix_tokens"] += seq.num_computed_tokens
        if stop == len(tokens):
            want["logits_indices"].append(len(want["input_ids"]) - 1)
            want["temperatures"].append(seq.sampling_params.temperature)
    return want


def check_batch(batch, want):
    temperatures = want.pop("temperatures")
    assert batch.sampling.temperatures.tolist() == pytest.approx(temperatures)
    assert (batch.sampling.uniforms is None) == (not any(temperatures)), "greedy rows need no random numbers"
    for name, expected in want.items():
        actual = getattr(batch if hasattr(batch, name) else batch.metadata, name)
        if isinstance(actual, torch.Tensor):
            assert actual.dtype == torch.int32, name
            assert actual.is_contiguous(), name
            actual = actual.tolist()
        else:
            assert type(actual) is type(expected), name
        assert actual == expected, name


@st.composite
def steps(draw):
    """(chunks, block_size) of a step with sequences of any length, progress and block table."""
    block_size = draw(st.integers(1, 9))
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
        num_computed = draw(st.integers(0, len(tokens) - 1))
        num_new = draw(st.just(1) | st.integers(1, len(tokens) - num_computed))
        num_blocks = -(-(num_computed + num_new) // block_size)
        table = draw(st.lists(st.integers(1, 10_000), min_size=num_blocks, max_size=num_blocks, unique=True))
        temperature = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
        chunks.append((make_seq(tokens, num_computed, table, temperature), num_new))
    return sorted(chunks, key=lambda chunk: chunk[1] > 1), block_size


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps())
def test_batch_equals_a_loop_over_tokens(step):
    chunks, block_size = step
    check_batch(build_batch(schedule(chunks), block_size), expected_batch(chunks, block_size))


def test_example_of_the_docstring():
    a = make_seq([10, 11, 12, 13, 14, 15], 5, [7, 2])
    b = make_seq([20, 21, 22, 23, 24, 25, 26], 4, [3, 5])
    batch = build_batch(schedule([(a, 1), (b, 3)]), 4)
    assert batch.input_ids.tolist() == [15, 24, 25, 26]
    assert batch.positions.tolist() == [5, 4, 5, 6]
    assert batch.metadata.slot_mapping.tolist() == [9, 20, 21, 22]
    assert batch.metadata.block_tables.tolist() == [[7, 2], [3, 5]]
    assert batch.metadata.seq_lens.tolist() == [6, 7]
    assert batch.metadata.cu_seqlens_q.tolist() == [0, 1, 4]
    assert batch.logits_indices.tolist() == [0, 3]
    assert (batch.metadata.prefill_cu_seqlens_q.tolist(), batch.metadata.prefill_cu_seqlens_k.tolist()) == (
        [0, 3],
        [0, 7],
    )
    assert (batch.metadata.num_decodes, batch.metadata.max_seqlen_q, batch.metadata.max_seqlen_k) == (1, 3, 7)


def test_blocks_behind_the_longest_context_are_left_out():
    """A draft model reserves blocks before the step that fills them."""
    batch = build_batch(schedule([(make_seq([1], 0, [5, 6, 7]), 1), (make_seq(list(range(8)), 0, [4, 3]), 8)]), 4)
    assert batch.metadata.block_tables.tolist() == [[5, 6], [4, 3]]


def test_batch_does_not_change_when_its_sequences_go_on():
    """A step may still be in flight when the next one is planned: no array shares memory with a sequence."""
    seqs = [make_seq([1, 2, 3], 2, [1]), make_seq([4, 5, 6], 0, [2])]
    for chunks in ([(seqs[0], 1), (seqs[1], 3)], [(seqs[1], 3)], [(seqs[0], 1)]):
        batch = build_batch(schedule(chunks), 4)
        want = expected_batch(chunks, 4)
        for seq, _ in chunks:
            seq.token_ids[:] = array("i", [token_id + 50 for token_id in seq.token_ids])
            seq.block_table[:] = array("i", [block_id + 1 for block_id in seq.block_table])
        check_batch(batch, want)


@pytest.mark.parametrize(
    ("num_tokens", "max_num_seqs", "max_model_len", "lens"),
    [
        (8192, 256, 40960, [7937] + [1] * 255),
        (8192, 4, 1000, [1000] * 4),
        (10, 256, 40960, [1] * 10),
        (5, 8, 40960, [1] * 5),
        (100, 3, 60, [60, 39, 1]),
    ],
)
def test_the_largest_batch_samples_a_token_for_each_sequence(num_tokens, max_num_seqs, max_model_len, lens):
    """Logits of all rows, and what top-p sorts, can be more memory than the forward pass of a small model."""
    batch = largest_batch(num_tokens, max_num_seqs, max_model_len, 16)
    assert sorted(batch.metadata.seq_lens.tolist(), reverse=True) == lens  # decodes of one token come first
    assert len(batch.input_ids) == sum(lens) <= num_tokens
    assert len(batch.logits_indices) == len(batch.sampling.uniforms) == len(batch.sampling.top_p) == max_num_seqs
    assert batch.metadata.slot_mapping.max() < 16, "only the null block is written to"
