"""Rows that ask for what the core's sampler does not do, and checks of what they get.

`nanovllm_testing/sampling_rows.py` has those of the core.
"""

import math

import torch

from nanovllm.sampler import sample_tokens
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling import logits, runner_hooks
from nanovllm_extras.sampling.processed_batch import build_sampling
from nanovllm_testing.sampling_rows import EOS, HISTORY, VOCAB_SIZE, Rows, random_logits
from nanovllm_testing.sampling_rows import random_ids as random_ids

BAD_WORDS = {"x": [7], " x": [3, 11]}  # the word "x", as it begins a text and as it follows a space


class Tokenizer:
    def encode(self, text, add_special_tokens):
        return BAD_WORDS[text]


def processors_of(params):
    """As a request gets them."""
    return () if params.is_plain else logits.processors_of(params, Tokenizer(), 1 << 20)


def sample(raw, batch):
    return runner_hooks.sample(raw, batch, sample_tokens)


class FullRows(Rows):
    fields = {**Rows.fields, "min_tokens": [0, 20], "stop_token_ids": [None, [6, 10]], "logprobs": [None, 0, 3]}

    def sequence(self, prompt=(1, 2, 3), output=(), seed=0, sample_index=0, processors=None, eos=EOS, **fields):
        """A sequence that has `output` so far and is about to get its next token."""
        params = SamplingParams(**{"max_tokens": None, **fields})
        processors = processors_of(params) if processors is None else processors
        seq = Sequence("r", list(prompt), params, frozenset([eos]), seed, sample_index, processors=processors)
        for token_id in output:
            seq.append_token(token_id)
        return seq

    def sampling_of(self, rows):
        """The `ProcessedSampling` of sequences whose next token comes after all that they have."""
        return build_sampling(rows, [len(seq.token_ids) for seq in rows])

    def draw(self, raw, batch):
        return sample(raw, batch)[0]

    def changed(self, x, seq):
        p = seq.sampling_params
        prompt, output = seq.token_ids[: seq.num_prompt_tokens].tolist(), seq.output_token_ids
        if p.allowed_token_ids is not None:
            x = [value if t in p.allowed_token_ids else -math.inf for t, value in enumerate(x)]
        for *first, last in BAD_WORDS.values() if p.bad_words else ():
            if not first or output[-len(first) :] == first:
                x[last] = -math.inf
        if len(output) < p.min_tokens:
            for t in [*(p.stop_token_ids or ()), EOS]:
                x[t] = -math.inf
        for t, bias in (p.logit_bias or {}).items():
            x[t] += bias
        for processor in p.logits_processors or ():
            x = processor(output, torch.tensor(x, dtype=torch.float64)).tolist()
        for t in range(len(x)):
            if t in prompt or t in output:
                x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
            x[t] -= p.frequency_penalty * output.count(t)
            x[t] -= p.presence_penalty * (t in output)
        return x


ROWS = FullRows()
sequence, sampling_of = ROWS.sequence, ROWS.sampling_of
expected_probs, drawn_shares, assert_drawn_from = ROWS.expected_probs, ROWS.drawn_shares, ROWS.assert_drawn_from
assert_a_row_is_drawn_the_same_whatever_its_neighbours_want = (
    ROWS.assert_a_row_is_drawn_the_same_whatever_its_neighbours_want
)
assert_random_combinations = ROWS.assert_random_combinations
assert_frequencies_follow_the_distribution = ROWS.assert_frequencies_follow_the_distribution


def assert_logprobs_are_those_of_the_model(wanted, fields):
    """Before all that `fields` change. `wanted`: the number of log-probabilities that each row asks for."""
    rows = [sequence(*HISTORY, logprobs=k, **fields) for k in wanted]
    raw = random_logits(len(rows))
    token_ids, logprobs = sample(raw, sampling_of(rows))
    expected = raw.double().log_softmax(dim=-1)
    k = VOCAB_SIZE if -1 in wanted else max(one or 0 for one in wanted)
    best, best_ids = expected.sort(dim=-1, descending=True)
    assert logprobs.top.shape == (len(rows), k)
    assert torch.equal(logprobs.top_ids, best_ids[:, :k])
    torch.testing.assert_close(logprobs.top.double(), best[:, :k], rtol=0, atol=1e-5)
    for i, token_id in enumerate(token_ids.tolist()):
        assert abs(float(logprobs.chosen[i]) - float(expected[i, token_id])) < 1e-5
        assert int(logprobs.ranks[i]) == best_ids[i].tolist().index(token_id) + 1
