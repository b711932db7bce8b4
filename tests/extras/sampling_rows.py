"""Rows that ask for anything, what their next tokens must be drawn from, and checks that they are.

The oracle is a loop in float64 over single rows. It is compared with the shares of an even grid of uniform numbers that
each token gets, and by chi-square with draws from the engine's own uniform numbers.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from nanovllm.extras import runner_hooks
from nanovllm.extras.full_sequence import Sequence
from nanovllm.extras.input_processor import InputProcessor
from nanovllm.extras.processed_batch import build_sampling
from nanovllm.extras.request_params import SamplingParams
from nanovllm.sampler import sample_tokens

VOCAB_SIZE = 40
EOS = 39
BAD_WORDS = {"x": [7], " x": [3, 11]}  # the word "x", as it begins a text and as it follows a space
HISTORY = ([1, 2, 2, 30], [5, 5, 5, 30, 8, 3])


class Tokenizer:
    def encode(self, text, add_special_tokens):
        return BAD_WORDS[text]


def processors_of(params):
    """As a request gets them; extras are imported if `params` ask for one."""
    return InputProcessor._processors(SimpleNamespace(tokenizer=Tokenizer()), params)


def sequence(prompt=(1, 2, 3), output=(), seed=0, sample_index=0, processors=None, eos=EOS, **fields):
    """A sequence that has `output` so far and is about to get its next token."""
    params = SamplingParams(**{"max_tokens": None, **fields})
    processors = processors_of(params) if processors is None else processors
    seq = Sequence("r", list(prompt), params, frozenset([eos]), seed, sample_index, processors=processors)
    for token_id in output:
        seq.append_token(token_id)
    return seq


def sampling_of(rows):
    """The `ProcessedSampling` of sequences whose next token comes after all that they have."""
    return build_sampling(rows, [seq.token_ids.length for seq in rows])


def random_logits(num_rows, vocab_size=VOCAB_SIZE, seed=0, scale=3.0):
    """[num_rows, vocab_size] float32"""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_ids(length, seed, vocab_size=VOCAB_SIZE):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample(raw, batch):
    return runner_hooks.sample(raw, batch, sample_tokens)


# ---- the oracle


def expected_probs(raw, seq):
    """What the next token of `seq` is drawn from, step by step in float64: a list of probabilities."""
    p = seq.sampling_params
    prompt, output = seq.token_ids.view(0, seq.num_prompt_tokens).tolist(), seq.output_token_ids
    x = [float(value) for value in raw]
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
    if p.temperature == 0:
        best = max(range(len(x)), key=lambda t: x[t])
        return [float(t == best) for t in range(len(x))]
    x = [value / p.temperature for value in x]
    probs = softmax(x)
    x = [value if probs[t] >= p.min_p * max(probs) else -math.inf for t, value in enumerate(x)]
    if p.top_k > 0:
        kth = sorted(x, reverse=True)[min(p.top_k, len(x)) - 1]
        x = [value if value >= kth else -math.inf for value in x]
    if p.top_p < 1:
        probs, so_far = softmax(x), 0.0
        for t in sorted(range(len(x)), key=lambda t: -x[t]):
            if so_far >= p.top_p:
                x[t] = -math.inf
            so_far += probs[t]
    return softmax(x)


def softmax(x):
    powers = [math.exp(value - max(x)) for value in x]
    return [power / math.fsum(powers) for power in powers]


def random_fields(seed, **more):
    """Some of the fields, with random values, in any combination. `more`: fields with the values to choose among."""
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "temperature": [0, 1.0, 0.4, 1.7, 3.0],
        "top_k": [0, -1, 0, 3, 12, 1],
        "top_p": [1, 1, 0.9, 0.4],
        "min_p": [0, 0, 0.02, 0.3],
        "min_tokens": [0, 20],
        "stop_token_ids": [None, [6, 10]],
        "logprobs": [None, 0, 3],
        **more,
    }
    return {name: values[int(torch.randint(len(values), (), generator=generator))] for name, values in fields.items()}


# ---- checks


def drawn_shares(raw, rows, num_points=400):
    """Share of an even grid of uniform numbers for which each row gets each token: [num_rows, vocab_size]"""
    batch = sampling_of(rows)
    counts = torch.zeros(raw.shape, dtype=torch.int64)
    for i in range(num_points):
        uniforms = torch.full((len(rows),), (i + 0.5) / num_points, dtype=torch.float64)
        if batch.uniforms is not None:
            batch = replace(batch, uniforms=uniforms)
        token_ids, _ = sample(raw, batch)
        counts[torch.arange(len(rows)), token_ids] += 1
    return counts / num_points


def assert_drawn_from(raw, rows, num_points=400):
    """Each token gets its interval of [0, 1): its share is right to one point of the grid, and 0 if it has none."""
    before = raw.clone()
    shares = drawn_shares(raw, rows, num_points)
    assert torch.equal(raw, before), "log-probabilities are to be taken of these"
    for i, seq in enumerate(rows):
        expected = torch.tensor(expected_probs(raw[i], seq), dtype=torch.float64)
        assert (shares[i] - expected).abs().max() < 1.01 / num_points, seq.sampling_params
        assert not shares[i][expected == 0].any(), seq.sampling_params


def assert_a_row_is_drawn_the_same_whatever_its_neighbours_want(**more):
    rows = [sequence(*HISTORY, seed=i, **random_fields(i, **more)) for i in range(30)]
    raw = random_logits(len(rows))
    together, _ = sample(raw, sampling_of(rows))
    assert together.tolist() == [int(sample(raw[i : i + 1], sampling_of([seq]))[0]) for i, seq in enumerate(rows)]


def assert_random_combinations(**more):
    """100 rows in one batch, with histories of different lengths."""
    rows = [
        sequence(random_ids(1 + i % 9, i), random_ids(i % 13, 99 + i), **random_fields(i, **more)) for i in range(100)
    ]
    assert_drawn_from(random_logits(len(rows), scale=2.0), rows)


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


def assert_frequencies_follow_the_distribution(kind, fields):
    """Chi-square with the engine's own uniform numbers, over 100 seeds and 100 positions; p below 0.001 fails."""
    raw = random_logits(1, seed=kind, scale=1.0)
    seq = sequence(*HISTORY, **fields)
    draws = [sequence(seed=1000 * kind + i) for i in range(100)]
    uniforms = []
    for _ in range(100):
        uniforms.append(sampling_of(draws).uniforms)
        for drawn in draws:
            drawn.token_ids.length += 1
    batch = replace(sampling_of([seq] * 10_000), uniforms=torch.cat(uniforms))
    token_ids, _ = sample(raw.expand(10_000, -1), batch)
    counts = torch.bincount(token_ids, minlength=VOCAB_SIZE).double()
    expected = torch.tensor(expected_probs(raw[0], seq), dtype=torch.float64) * 10_000
    assert not counts[expected == 0].any()
    is_rare = expected < 10  # together they are one cell
    cells = [torch.cat([part[~is_rare], part[is_rare].sum()[None]]) for part in (counts, expected)]
    degrees_of_freedom = int((~is_rare).sum()) - 1
    if expected[is_rare].any():
        degrees_of_freedom += 1
    else:
        cells = [part[:-1] for part in cells]
    assert degrees_of_freedom >= 3
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    p_value = torch.special.gammaincc(torch.tensor(degrees_of_freedom / 2, dtype=torch.float64), chi_square / 2)
    assert p_value > 0.001, fields
