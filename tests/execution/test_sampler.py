"""`sampler.sample`: from the logits of a step to tokens and log-probabilities, rows of all kinds in one batch.

Oracles: `transformers`' logits processors for repetition penalty, top-k, top-p and min-p, each alone, mask for mask and
row by row; a loop in float64 over single rows for the other stages and for the order of all, compared with the shares
of an even grid of uniform numbers that each token gets; the exact distribution, by chi-square, for draws with the
engine's own uniform numbers; `log_softmax` in float64 for log-probabilities.

Seen to fail when broken: any two stages swapped; a stage left out; a penalty with the wrong sign, over the prompt
instead of the output or the other way round; `<` for `<=` in top-p; a draw that is one token off or rounds to float32;
a neighbour's parameters; greedy rows that are drawn; log-probabilities taken after the temperature; ranks from 0.
"""

import math
from dataclasses import replace

import pytest
import torch
import transformers

from nanovllm.execution import logits_processing, sampler
from nanovllm.execution.logprobs import compute_logprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.sequence import Sequence
from tests.steps import sampling_of

VOCAB_SIZE = 40
EOS = 39
BAD_WORDS = [[7], [3, 11]]  # as tokens; "x" stands for them in the parameters


def sequence(prompt=(1, 2, 3), output=(), seed=0, **fields):
    """A sequence that has `output` so far and is about to get its next token."""
    bad_word_ids = BAD_WORDS if fields.get("bad_words") else ()
    params = SamplingParams(**{"max_tokens": None, **fields})
    seq = Sequence("r", list(prompt), params, frozenset([EOS]), 0, seed, 0, bad_word_ids)
    for token_id in output:
        seq.append_token(token_id)
    return seq


def random_logits(num_rows, vocab_size=VOCAB_SIZE, seed=0, scale=3.0):
    """[num_rows, vocab_size] float32"""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_ids(length, seed, vocab_size=VOCAB_SIZE):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- each stage that transformers has, alone -------------------------------------------------------------------------


def assert_equal_rows(ours, theirs):
    assert torch.equal(ours, torch.cat(theirs))  # -inf at the same places, and all else the same number


def test_repetition_penalty_is_that_of_transformers():
    penalties = [1.0, 1.3, 0.5, 2.0, 1.05, 5.0, 1.0]
    histories = [(random_ids(3 + 4 * i, i), random_ids(2 * i, 50 + i)) for i in range(len(penalties))]
    raw = random_logits(len(penalties), vocab_size=200)
    raw[:, :20] = 0
    rows = [sequence(*h, repetition_penalty=p) for p, h in zip(penalties, histories, strict=True)]
    expected = [
        transformers.RepetitionPenaltyLogitsProcessor(p)(torch.tensor([prompt + output]), raw[i : i + 1])
        for i, (p, (prompt, output)) in enumerate(zip(penalties, histories, strict=True))
    ]
    assert_equal_rows(sampler.process(raw, sampling_of(rows)), expected)


TRUNCATIONS = {
    "top_k": (
        transformers.TopKLogitsWarper,
        [1, 2, 5, 50, 499, 500, 7],
        [0, -1],
    ),
    "top_p": (transformers.TopPLogitsWarper, [0.9, 0.5, 0.1, 0.01, 0.999, 1e-9, 0.75], [1.0]),
    "min_p": (transformers.MinPLogitsWarper, [0.1, 0.5, 0.01, 1.0, 0.9, 1e-6, 0.05], [0.0]),
}


def truncate(raw, batch):
    return sampler.truncate(raw, batch.top_k, batch.top_p, batch.min_p, batch.max_top_k)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("name", TRUNCATIONS)
def test_truncation_is_that_of_transformers(name, scale):
    """Rows with each value, with the neutral ones between them."""
    warper, values, neutral = TRUNCATIONS[name]
    fields = [{name: value} for value in [*values, *neutral, *values]]
    raw = random_logits(len(fields), vocab_size=500, scale=scale)
    ours = truncate(raw, sampling_of([sequence(**f) for f in fields]))
    expected = [
        row[None] if f[name] in neutral else warper(f[name])(None, row[None])
        for f, row in zip(fields, raw, strict=True)
    ]
    assert_equal_rows(ours, expected)


@pytest.mark.parametrize("max_top_k", ["few", "one has no top-k"])
def test_top_k_and_top_p_together_are_those_of_transformers_in_turn(max_top_k):
    """Where all rows have a small top-k, top-p sorts the few tokens that are left: the same, but cheaper."""
    fields = [{"top_k": k, "top_p": p} for k in (1, 3, 20, 60) for p in (1.0, 0.9, 0.5, 0.05)]
    fields += [{"top_p": 0.6}] if max_top_k == "one has no top-k" else []
    raw = random_logits(len(fields), vocab_size=500, scale=1.0)
    batch = sampling_of([sequence(**f) for f in fields])
    assert batch.max_top_k == (60 if max_top_k == "few" else 0)
    expected = []
    for f, row in zip(fields, raw, strict=True):
        kept = transformers.TopKLogitsWarper(f["top_k"])(None, row[None]) if "top_k" in f else row[None]
        expected.append(transformers.TopPLogitsWarper(f["top_p"])(None, kept))
    assert_equal_rows(truncate(raw, batch), expected)


def test_tokens_as_likely_as_the_kth_stay():
    raw = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]] * 2)
    batch = sampling_of([sequence(top_k=2), sequence(top_k=2, top_p=0.99999)])
    for row in truncate(raw, batch):
        assert row.isfinite().tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize(("top_p", "num_left"), [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)])
def test_top_p_that_is_reached_exactly_is_enough(top_p, num_left):
    raw = torch.tensor([[0.0, 2e-9, 1e-9, 3e-9]])  # one after the other, but each has a probability of 1/4
    ours = truncate(raw, sampling_of([sequence(top_p=top_p)]))
    assert ours.isfinite().tolist() == [(raw[0] >= raw[0].topk(num_left).values[-1]).tolist()]
    if top_p < 1:
        assert torch.equal(ours, transformers.TopPLogitsWarper(top_p)(None, raw))


@pytest.mark.parametrize(("top_p", "expected"), [(0.3, [1]), (0.5, [1, 3, 4]), (0.7, [1, 3, 4]), (0.95, [0, 1, 3, 4])])
@pytest.mark.parametrize("top_k", [0, 4])
def test_tokens_as_likely_as_the_least_likely_in_top_p_stay(top_p, expected, top_k):
    """In whatever order equal ones are sorted: of tokens 1, 3 and 4, two are enough for 0.7."""
    raw = torch.tensor([[1, 4, 0, 3, 3]]).log()
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [3, 0, 4, 1, 2]):
        ours = truncate(raw[:, order], sampling_of([sequence(top_p=top_p, top_k=top_k)]))
        assert sorted(order[i] for i in ours[0].isfinite().nonzero()[:, 0].tolist()) == expected


def test_a_top_k_beyond_the_vocabulary_is_all():
    raw = random_logits(2)
    assert torch.equal(truncate(raw, sampling_of([sequence(top_k=10**9)] * 2)), raw)


# --- all stages, and their order -------------------------------------------------------------------------------------


def expected_probs(raw, seq):
    """What the next token of `seq` is drawn from, step by step in float64: a list of probabilities."""
    p = seq.sampling_params
    prompt, output = seq.token_ids.view(0, seq.num_prompt_tokens).tolist(), seq.output_token_ids
    x = [float(value) for value in raw]
    if p.allowed_token_ids is not None:
        x = [value if t in p.allowed_token_ids else -math.inf for t, value in enumerate(x)]
    for *first, last in seq.bad_word_ids:
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


def drawn_shares(raw, rows, num_points=400):
    """Share of an even grid of uniform numbers for which each row gets each token: [num_rows, vocab_size]"""
    batch = sampling_of(rows)
    counts = torch.zeros(raw.shape, dtype=torch.int64)
    for i in range(num_points):
        uniforms = torch.full((len(rows),), (i + 0.5) / num_points, dtype=torch.float64)
        if batch.uniforms is not None:
            batch = replace(batch, uniforms=uniforms)
        token_ids, _ = sampler.sample(raw, batch)
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


HISTORY = ([1, 2, 2, 30], [5, 5, 5, 30, 8, 3])


def double(output_token_ids, logits):
    return logits * 2


def forbid_last(output_token_ids, logits):
    logits = logits.clone()
    logits[output_token_ids[-1:]] = -math.inf
    return logits


ALONE = [
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.4},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"logit_bias": {5: 4.0, 1: -100, 17: -2.5}},
    {"allowed_token_ids": [2, 3, 5, 7, 11, 13, 30]},
    {"bad_words": ["x"]},
    {"min_tokens": 7, "stop_token_ids": [4, 8]},
    {"min_tokens": 6, "stop_token_ids": [4, 8]},
    {"logits_processors": [double]},
    {"logits_processors": [forbid_last, double]},
    {},
]


def test_each_field_alone_in_one_batch():
    rows = [sequence(*HISTORY, **fields) for fields in ALONE]
    assert_drawn_from(random_logits(len(rows), scale=1.5), rows)


# each of these comes out differently if its stages change places
PAIRS = [
    {"allowed_token_ids": [5, 6, 7, 11], "bad_words": ["x"]},
    {"allowed_token_ids": [5, 6, 30], "logit_bias": {5: 1.0, 12: 100.0}},
    {"bad_words": ["x"], "logit_bias": {7: 100.0, 11: 100.0}},
    {"min_tokens": 9, "stop_token_ids": [8], "logit_bias": {8: 100.0, EOS: 50.0}},
    {"logit_bias": {5: 2.0, 6: -3.0}, "logits_processors": [double]},
    {
        "allowed_token_ids": [5, 6, 7, 30],
        "logits_processors": [lambda output_token_ids, logits: logits.nan_to_num(neginf=-1)],
    },
    {"logits_processors": [double], "repetition_penalty": 1.5, "presence_penalty": 1.0},
    {"logit_bias": {5: 3.0, 2: -3.0, 30: 1.5}, "repetition_penalty": 2.0},
    {
        "logits_processors": [double, forbid_last, lambda output_token_ids, logits: logits + 1],
        "repetition_penalty": 1.5,
    },
    {"repetition_penalty": 1.7, "presence_penalty": 1.9, "frequency_penalty": 1.1},
    {"repetition_penalty": 0.6, "presence_penalty": -1.9, "frequency_penalty": -0.4},
    {"presence_penalty": 2.0, "temperature": 0.4},
    {"frequency_penalty": 1.0, "temperature": 3.0},
    {"temperature": 2.5, "min_p": 0.3},
    {"temperature": 0.5, "min_p": 0.05},
    {"temperature": 2.5, "top_p": 0.5},
    {"min_p": 0.15, "top_p": 0.7},
    {"min_p": 0.3, "top_p": 0.9},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 3, "top_p": 0.5},
    {"top_k": 5, "min_p": 0.1},
    {"presence_penalty": 2.0, "top_k": 3},
    {"frequency_penalty": -2.0, "top_p": 0.5},
    {"repetition_penalty": 0.3, "min_p": 0.3},
    {"logit_bias": {12: 9.0}, "top_k": 1},
]


def test_pairs_of_fields_come_in_vllms_order():
    rows = [sequence(*HISTORY, **fields) for fields in PAIRS]
    raw = random_logits(1, scale=1.5).expand(len(rows), -1).contiguous()
    assert_drawn_from(raw, rows)


def random_fields(seed):
    """Some of the fields, with random values, in any combination."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    return {
        "presence_penalty": pick(0, 0, 1.3, -0.8),
        "frequency_penalty": pick(0, 0, 0.6, -0.3),
        "repetition_penalty": pick(1, 1, 1.4, 0.7),
        "temperature": pick(0, 1.0, 0.4, 1.7, 3.0),
        "top_k": pick(0, -1, 0, 3, 12, 1),
        "top_p": pick(1, 1, 0.9, 0.4),
        "min_p": pick(0, 0, 0.02, 0.3),
        "logit_bias": pick(None, None, {3: 2.5, 30: -1.0}),
        "allowed_token_ids": pick(None, None, list(range(3, 33))),
        "bad_words": pick(None, ["x"]),
        "logits_processors": pick(None, None, [double], [forbid_last]),
        "min_tokens": pick(0, 20),
        "stop_token_ids": pick(None, [6, 10]),
        "logprobs": pick(None, 0, 3),
    }


def test_random_combinations_in_one_batch():
    rows = [sequence(random_ids(1 + i % 9, i), random_ids(i % 13, 99 + i), **random_fields(i)) for i in range(100)]
    assert_drawn_from(random_logits(len(rows), scale=2.0), rows)


def test_a_row_is_drawn_the_same_whatever_its_neighbours_want():
    rows = [sequence(*HISTORY, seed=i, **random_fields(i)) for i in range(30)]
    raw = random_logits(len(rows))
    together, _ = sampler.sample(raw, sampling_of(rows))
    alone = [int(sampler.sample(raw[i : i + 1], sampling_of([seq]))[0]) for i, seq in enumerate(rows)]
    assert together.tolist() == alone


def test_processors_see_their_own_row_and_output():
    seen = []

    def note(output_token_ids, logits):
        seen.append((output_token_ids, logits.clone()))
        return logits

    raw = random_logits(3)
    rows = [sequence(), sequence([1], [5, 6], logits_processors=[note], logit_bias={4: 1.0}), sequence()]
    sampler.sample(raw, sampling_of(rows))
    ((output_token_ids, logits),) = seen
    assert output_token_ids == [5, 6]
    assert torch.equal(logits, raw[1] + torch.eye(VOCAB_SIZE)[4])


# --- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_rows_among_random_ones():
    """Those with truncation too, which never takes the likeliest; 200 draws of their neighbours leave them alone."""
    greedy = [{}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.9}, {"seed": 3}, {"top_p": 1e-6}]
    rows = []
    for fields in greedy:
        rows += [sequence(temperature=0, **fields), sequence(temperature=5.0)]
    raw = random_logits(len(rows))
    shares = drawn_shares(raw, rows, 200)
    assert shares[::2].argmax(dim=-1).tolist() == raw[::2].argmax(dim=-1).tolist()
    assert (shares[::2].amax(dim=-1) == 1).all()
    assert (shares[1::2].amax(dim=-1) < 1).all()


def test_the_first_of_equally_likely_tokens_is_greedy_whoever_is_in_the_batch():
    raw = torch.tensor([[0.0, 2.0, 1.0, 2.0]] * 2)
    for rows in ([sequence(temperature=0)] * 2, [sequence(temperature=0), sequence(temperature=1.0)]):
        assert int(sampler.sample(raw, sampling_of(rows))[0][0]) == 1


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-8, 1e-20, 1e-37, 1e-38, 1e-40, 1e-45, 1e-60])
def test_the_lower_the_temperature_the_greedier(temperature):
    """No legal temperature is too low: what it makes of the logits may be infinite, but it has a limit."""
    raw = random_logits(20, scale=10.0)
    token_ids, _ = sampler.sample(raw, sampling_of([sequence(temperature=temperature, seed=i) for i in range(20)]))
    assert token_ids.tolist() == raw.argmax(dim=-1).tolist()


# --- draws -----------------------------------------------------------------------------------------------------------


def test_frequencies_follow_the_distribution():
    """Chi-square with the engine's own uniform numbers, over 100 seeds and 100 positions; p below 0.001 fails."""
    kinds = [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05, "presence_penalty": 1.0},
    ]
    for kind, fields in enumerate(kinds):
        raw = random_logits(1, seed=kind, scale=1.0)
        seq = sequence(*HISTORY, **fields)
        draws = []
        for seed in range(100):
            for position in range(100):
                draws.append(sequence(seed=1000 * kind + seed))
                draws[-1].token_ids.length += position
        batch = replace(sampling_of([seq] * len(draws)), uniforms=sampling_of(draws).uniforms)
        token_ids, _ = sampler.sample(raw.expand(len(draws), -1), batch)
        counts = torch.bincount(token_ids, minlength=VOCAB_SIZE).double()
        expected = torch.tensor(expected_probs(raw[0], seq), dtype=torch.float64) * len(draws)
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


def test_a_large_vocabulary_is_drawn_to_the_last_token():
    """Of 100,003 equally likely tokens each has the same interval, which sums in float32 would shift by hundreds."""
    vocab_size = 100_003
    uniforms = torch.tensor([0.0, 1e-5, 0.25, 0.5, 0.9, 0.999, 1 - 2.0**-52], dtype=torch.float64)
    token_ids = sampler.invert_distribution(torch.zeros(len(uniforms), vocab_size), uniforms)
    assert (token_ids - uniforms * vocab_size).abs().max() <= 1
    assert int(token_ids[-1]) == vocab_size - 1


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.full((3, 9), -math.inf)
    logits[:, [2, 6]] = 0.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    assert sampler.invert_distribution(logits, uniforms).tolist() == [2, 6, 6]


# --- short paths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperatures", [[0, 0, 0], [0.7, 1.0, 2.0], [0, 1.0, 0]])
def test_plain_rows_touch_no_slow_path(temperatures, monkeypatch):
    """No stage is called for nothing, and no copy is made."""

    def fail(*_):
        pytest.fail("a stage that no row asks for was run")

    stages = [name for name in dir(sampler) if name.startswith("apply_")]
    assert len(stages) == 3
    for name in [*stages, "compute_logprobs"]:
        monkeypatch.setattr(sampler, name, fail)
    earlier = [name for name in dir(logits_processing) if name.startswith("apply_")]
    assert len(earlier) == 4
    for name in earlier:
        monkeypatch.setattr(logits_processing, name, fail)
    raw = random_logits(3)
    batch = sampling_of([sequence(temperature=t) for t in temperatures])
    assert sampler.process(raw, batch) is raw
    assert truncate(raw, batch) is raw
    _, logprobs = sampler.sample(raw, batch)
    assert logprobs is None


def test_a_greedy_batch_is_an_argmax_alone(monkeypatch):
    monkeypatch.setattr(sampler, "invert_distribution", lambda *_: pytest.fail("a greedy batch has nothing to draw"))
    raw = random_logits(4)
    token_ids, _ = sampler.sample(raw, sampling_of([sequence(temperature=0)] * 4))
    assert token_ids.tolist() == raw.argmax(dim=-1).tolist()


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [[0, 0], [3, None, 0], [2, -1], [VOCAB_SIZE]])
def test_logprobs_are_those_of_the_model_itself(wanted):
    """Before temperature, penalties, biases and masks, for rows that have all of these."""
    fields = {"temperature": 0.3, "presence_penalty": 2, "logit_bias": {1: 50.0}, "top_k": 9, "bad_words": ["x"]}
    rows = [sequence(*HISTORY, logprobs=k, **fields) for k in wanted]
    raw = random_logits(len(rows))
    token_ids, logprobs = sampler.sample(raw, sampling_of(rows))
    expected = raw.double().log_softmax(dim=-1)
    k = VOCAB_SIZE if -1 in wanted else max(one or 0 for one in wanted)
    best, best_ids = expected.sort(dim=-1, descending=True)
    assert logprobs.top.shape == (len(rows), k)
    assert torch.equal(logprobs.top_ids, best_ids[:, :k])
    torch.testing.assert_close(logprobs.top.double(), best[:, :k], rtol=0, atol=1e-5)
    for i, token_id in enumerate(token_ids.tolist()):
        assert float(logprobs.chosen[i]) == pytest.approx(float(expected[i, token_id]), abs=1e-5)
        assert int(logprobs.ranks[i]) == best_ids[i].tolist().index(token_id) + 1


def test_ranks_count_from_one_over_the_whole_vocabulary():
    raw = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 4)
    logprobs = compute_logprobs(raw, torch.tensor([1, 3, 2, 0]), 1)
    assert logprobs.ranks.tolist() == [1, 2, 3, 4]
    assert logprobs.top_ids.tolist() == [[1]] * 4


def test_more_logprobs_than_tokens_are_all():
    assert compute_logprobs(random_logits(1), torch.tensor([0]), 10**6).top.shape == (1, VOCAB_SIZE)


def test_half_precision_logits_are_judged_in_float32():
    raw = random_logits(6).bfloat16()
    token_ids, logprobs = sampler.sample(raw, sampling_of([sequence(temperature=0, logprobs=2)] * 6))
    expected = raw.double().log_softmax(dim=-1)
    assert logprobs.chosen.dtype == torch.float32
    torch.testing.assert_close(logprobs.chosen.double(), expected.amax(dim=-1), rtol=0, atol=1e-5)
    assert token_ids.tolist() == raw.argmax(dim=-1).tolist()
