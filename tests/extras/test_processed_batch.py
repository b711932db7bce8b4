"""What the runner makes of a batch in which rows ask for more than a token: masks, log-probabilities, a fast argmax.

Oracles: the loop in float64 of `sampling_rows.py`; `log_softmax` in float64 for log-probabilities; tables worked out by
hand for masks. `test_logits.py` has penalties, biases, and so on; `tests/test_sampler.py` has the core's sampler.

Seen to fail when broken: log-probabilities taken after the temperature; ranks from 0; `min_tokens` that masks only end
tokens, only `stop_token_ids`, or one position too long or too short.
"""

import pytest
import torch

from nanovllm import sampler
from nanovllm.batch import SamplingBatch
from nanovllm.sampler import sample_tokens
from nanovllm_extras.execution.device_setup import sample_with
from nanovllm_extras.sampling import runner_hooks
from nanovllm_extras.sampling.logits_processors import ForbiddenTokens, apply_processors
from nanovllm_extras.sampling.logprobs import compute_logprobs
from nanovllm_extras.sampling.runner_hooks import wants_only_tokens
from nanovllm_testing import steps
from tests.extras import sampling_rows
from tests.extras.sampling_rows import (
    HISTORY,
    assert_drawn_from,
    random_logits,
    sample,
    sampling_of,
)

EOS = 90


def sequence(*args, **fields):
    return sampling_rows.sequence(*args, eos=EOS, **fields)


# ---- draws


def test_min_tokens_alone_in_a_batch():
    fields = [
        {"min_tokens": 7, "stop_token_ids": [4, 8]},
        {"min_tokens": 6, "stop_token_ids": [4, 8]},
        {"min_tokens": 9, "stop_token_ids": [8], "top_p": 0.5},
        {},
    ]
    rows = [sampling_rows.sequence(*HISTORY, **one) for one in fields]
    assert_drawn_from(random_logits(len(rows), scale=1.5), rows)


def test_a_greedy_batch_is_that_of_the_backends_argmax():
    """Batches with rows that are drawn are the core's."""
    logits, others = random_logits(3, 50), (torch.tensor([0, 5, 0]), None, None)
    temperatures, uniforms = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.1, 0.5, 0.9])

    def argmax(logits):
        return torch.full((len(logits),), 7)

    assert sample_with(argmax, logits, temperatures).tolist() == [7, 7, 7]
    expected = sample_tokens(logits, temperatures, uniforms, *others).tolist()
    assert sample_with(argmax, logits, temperatures, uniforms, *others).tolist() == expected


# ---- nothing asked, nothing made


@pytest.mark.parametrize("temperatures", [[0, 0, 0], [0.7, 1.0, 2.0], [0, 1.0, 0]])
def test_plain_rows_touch_no_slow_path(temperatures, monkeypatch):
    """No processor is called for nothing, and no copy is made."""

    def fail(*_):
        pytest.fail("what no row asks for was computed")

    for name in ("apply_min_p", "apply_top_k", "apply_top_p"):
        monkeypatch.setattr(sampler, name, fail)
    monkeypatch.setattr(runner_hooks, "compute_logprobs", fail)
    raw = random_logits(3)
    batch = sampling_of([sequence(temperature=t) for t in temperatures])
    assert batch.processors == ()
    assert apply_processors(raw, batch.processors) is raw
    assert wants_only_tokens(batch)
    _, logprobs = sample(raw, batch)
    assert logprobs is None


SPECIAL = ("top_k", "top_p", "min_p", "num_logprobs")


def test_plain_rows_ask_for_nothing():
    rows = [
        sequence(temperature=0),
        sequence(temperature=0.7),
        sequence(seed=3, n=2, stop_token_ids=[5], ignore_eos=True, top_k=-1, detokenize=False),
        sequence(stop=["x"], logit_bias={}, bad_words=[], logits_processors=[]),
    ]
    assert all(seq.is_plain for seq in rows), "so that the engine makes a batch of the core"
    batch = sampling_of(rows)
    assert [name for name in SPECIAL if getattr(batch, name) is not None] == []
    assert batch.processors == ()
    assert wants_only_tokens(batch)
    plain = steps.sampling_of(rows)
    assert type(plain) is SamplingBatch
    assert wants_only_tokens(plain)
    torch.testing.assert_close(batch.temperatures, torch.tensor([0, 0.7, 1, 1]), rtol=0, atol=0)
    assert batch.uniforms.tolist() == plain.uniforms.tolist() == steps.uniforms_of(rows).tolist()


# ---- log-probabilities


@pytest.mark.parametrize(
    ("wanted", "expected"), [([None, 3, 1], 3), ([0, None], 0), ([5, -1, 7], -1), ([None, None], None)]
)
def test_num_logprobs_is_the_most_that_any_row_wants(wanted, expected):
    batch = sampling_of([sequence(logprobs=k) for k in wanted])
    assert batch.num_logprobs == expected
    assert wants_only_tokens(batch) == (expected is None)


def test_ranks_count_from_one_over_the_whole_vocabulary():
    raw = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 4)
    logprobs = compute_logprobs(raw, torch.tensor([1, 3, 2, 0]), 1)
    assert logprobs.ranks.tolist() == [1, 2, 3, 4]
    assert logprobs.top_ids.tolist() == [[1]] * 4


def test_half_precision_logits_are_judged_in_float32():
    raw = random_logits(6).bfloat16()
    token_ids, logprobs = sample(raw, sampling_of([sequence(temperature=0, logprobs=2)] * 6))
    expected = raw.double().log_softmax(dim=-1)
    assert logprobs.chosen.dtype == torch.float32
    torch.testing.assert_close(logprobs.chosen.double(), expected.amax(dim=-1), rtol=0, atol=1e-5)
    assert token_ids.tolist() == raw.argmax(dim=-1).tolist()


# ---- min_tokens


def forbidden_in(rows):
    """{(row, token)} of the batch; nothing else is asked, and nothing to forbid makes no tensors."""
    processors = sampling_of(rows).processors
    if not processors:
        return set()
    (forbidden,) = processors
    assert isinstance(forbidden, ForbiddenTokens)
    return set(zip(forbidden.rows.tolist(), forbidden.token_ids.tolist(), strict=True))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_stop_tokens_of_both_kinds_until_it_is_reached(ignore_eos):
    fields = {"min_tokens": 3, "stop_token_ids": [4, 8], "ignore_eos": ignore_eos}
    stops = [4, 8] if ignore_eos else [4, 8, EOS]  # an end token that does not end anything is as good as others
    for num_output_tokens in range(6):
        rows = [sequence(), sequence(output=[9] * num_output_tokens, **fields)]
        expected = {(1, token_id) for token_id in stops} if num_output_tokens < 3 else set()
        assert forbidden_in(rows) == expected
