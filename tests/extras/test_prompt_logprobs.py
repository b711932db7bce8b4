"""Which rows of a step predict tokens of a prompt, what they give, and that each position is known once.

Oracle: tables worked out by hand for the rows, and `log_softmax` in float64 over the whole prompt for the values.
`tests/extras/test_sampling_end_to_end.py` has them through the engine.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests import prompt_logprobs
from nanovllm_extras.requests.prompt_logprobs import PromptLogprobs
from nanovllm_testing.steps import step_of

VOCAB_SIZE = 11


def make_seq(prompt, num_logprobs=None, output=(), gives_once=False):
    readers = () if num_logprobs is None else (PromptLogprobs(num_logprobs, None, gives_once),)
    seq = Sequence("r", prompt, SamplingParams(), readers=readers)
    for token_id in output:
        seq.append_token(token_id)
    return seq


def build(chunks):
    """The step of `chunks`, and the rows of its batch that its readers read."""
    cu_seqlens_q = np.cumsum([0, *(num_new for _, _, num_new in chunks)])
    return step_of(chunks), PromptLogprobs.build(step_of(chunks), cu_seqlens_q)


def test_a_row_predicts_the_next_token_of_its_prompt():
    """A decodes; B's chunk is the end of its prompt, whose last row draws; C's is the beginning; D asks for nothing."""
    a, b = make_seq([1, 2], 3, output=[5]), make_seq([1, 2, 3, 4, 5, 6, 7, 8], 2)
    c, d = make_seq([9, 8, 7, 6], 4), make_seq([1, 1, 1])
    _, rows = build([(a, 2, 1), (b, 4, 4), (d, 0, 3), (c, 0, 2)])
    assert rows.rows.tolist() == [1, 2, 3, 8, 9]
    assert rows.targets.tolist() == [6, 7, 8, 8, 7]
    assert rows.num_logprobs == 4


@pytest.mark.parametrize(("wanted", "expected"), [([0, 0], 0), ([2, 5], 5), ([3, -1], -1)])
def test_the_most_that_any_prompt_wants(wanted, expected):
    _, rows = build([(make_seq([1, 2, 3], k), 0, 3) for k in wanted])
    assert rows.num_logprobs == expected


def test_nothing_is_read_without_a_target():
    decode, last = make_seq([1, 2], 1, output=[5]), make_seq([1, 2, 3], 1)
    assert build([(decode, 2, 1), (last, 2, 1)])[1] is None
    assert build([(make_seq([1, 2, 3]), 0, 3)])[1] is None


def random_logits(num_rows):
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("logits_slice", [1, 2, 256])
def test_values_come_chunk_by_chunk_and_once(monkeypatch, logits_slice):
    """In chunks of 3, 1 and 4, of which the second is computed twice, as after a preemption; logits are the hidden
    states, and no more than a slice of them is asked for at once.
    """
    monkeypatch.setattr(prompt_logprobs, "LOGITS_SLICE", logits_slice)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    seq, other = make_seq(prompt, 2), make_seq([7, 7, 7], -1)
    (reader,), hidden = seq.readers, random_logits(len(prompt))
    sizes = []

    def compute_logits(hidden, rows):
        sizes.append(len(rows))
        return hidden[rows]

    for start, num_new in ((0, 3), (3, 1), (3, 1), (4, 4)):
        chunks = [(seq, start, num_new), (other, 0, 3)][: 2 if num_new == 3 else 1]  # the other asks for all
        step, rows = build(chunks)
        of_step = torch.cat([hidden[start : start + num_new], random_logits(3)[: 3 * (len(chunks) - 1)]])
        rows.compute(of_step, compute_logits).to_host().deliver(step)
    assert max(sizes) <= logits_slice
    expected = hidden.double().log_softmax(-1)
    assert len(reader.found) == len(prompt)
    assert reader.found[0] is None
    for position, found in enumerate(reader.found[1:], 1):
        values = expected[position - 1]
        order = values.argsort(descending=True).tolist()
        assert set(found) == {prompt[position], *order[:2]}
        for token_id, one in found.items():
            assert one.logprob == pytest.approx(float(values[token_id]), abs=1e-5)
            assert one.rank == order.index(token_id) + 1
    (other_reader,) = other.readers
    assert [len(found) for found in other_reader.found[1:]] == [VOCAB_SIZE] * 2


def test_deltas_give_them_once():
    for gives_once in (True, False):
        (reader,) = make_seq([1, 2, 3], 1, gives_once=gives_once).readers
        outputs = [SimpleNamespace(prompt_logprobs=None) for _ in range(3)]
        for output in outputs:
            reader.add_to(output)
        later = None if gives_once else [None]
        assert [output.prompt_logprobs for output in outputs] == [[None], later, later]
        reader.found.append({})
        assert outputs[0].prompt_logprobs == [None], "a snapshot"
