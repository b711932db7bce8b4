"""From the logits of a step to tokens, rows of all kinds in one batch.

Oracles: `transformers`' logits processors for top-k, top-p and min-p one by one, mask for mask and row by row; a loop
in float64 over single rows (`sampling_rows.py`) for the order of all, compared with the shares of an even grid of
uniform numbers that each token gets; the exact distribution, by chi-square, for draws with the engine's own uniform
numbers.

Seen to fail when broken: any two truncations swapped; one left out; `<` for `<=` in top-p; a draw that is one token off
or rounds to float32; a neighbour's parameters; greedy rows that are drawn.
"""

import math

import pytest
import torch
import transformers

from nanovllm import sampler
from nanovllm_testing.sampling_rows import HISTORY, VOCAB_SIZE, Rows, random_logits
from nanovllm_testing.steps import sampling_of

ROWS = Rows()
sequence, draw = ROWS.sequence, ROWS.draw

# ---- each truncation by itself


def assert_equal_rows(ours, theirs):
    assert torch.equal(ours, torch.cat(theirs))  # -inf at the same places, and all else the same number


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
    """The truncations that the batch needs, in the order of `sample_tokens` (tested below by what is drawn)."""
    for name in ("min_p", "top_k", "top_p"):
        if (limits := getattr(batch, name)) is not None:
            raw = getattr(sampler, f"apply_{name}")(raw, limits)
    return raw


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


@pytest.mark.parametrize("has_others", [False, True], ids=["few", "one has no top-k"])
def test_top_k_and_top_p_together_are_those_of_transformers_in_turn(has_others):
    """Where all rows have a small top-k, top-p sorts the few tokens that are left: the same, but cheaper."""
    fields = [{"top_k": k, "top_p": p} for k in (1, 3, 20, 60) for p in (1.0, 0.9, 0.5, 0.05)]
    fields += [{"top_p": 0.6}] if has_others else []
    raw = random_logits(len(fields), vocab_size=500, scale=1.0)
    batch = sampling_of([sequence(**f) for f in fields])
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


# ---- all together, and their order


ALONE = [
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {},
]


def test_each_field_alone_in_one_batch():
    rows = [sequence(*HISTORY, **fields) for fields in ALONE]
    ROWS.assert_drawn_from(random_logits(len(rows), scale=1.5), rows)


# each of these comes out differently if its parts change places
PAIRS = [
    {"temperature": 2.5, "min_p": 0.3},
    {"temperature": 0.5, "min_p": 0.05},
    {"temperature": 2.5, "top_p": 0.5},
    {"min_p": 0.15, "top_p": 0.7},
    {"min_p": 0.3, "top_p": 0.9},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 3, "top_p": 0.5},
    {"top_k": 5, "min_p": 0.1},
]


def test_pairs_of_fields_come_in_vllms_order():
    rows = [sequence(*HISTORY, **fields) for fields in PAIRS]
    raw = random_logits(1, scale=1.5).expand(len(rows), -1).contiguous()
    ROWS.assert_drawn_from(raw, rows)


def test_random_combinations_in_one_batch():
    ROWS.assert_random_combinations()


def test_a_row_is_drawn_the_same_whatever_its_neighbours_want():
    ROWS.assert_a_row_is_drawn_the_same_whatever_its_neighbours_want()


# float32 rounds these to 0, to 1 or to infinity, or no tensor holds them; all are legal
BORDERS = [
    {"top_p": 0.99999999, "top_k": 20},
    {"top_p": 1 - 1e-12},
    {"top_p": 1e-60, "top_k": VOCAB_SIZE},
    {"top_k": 2**70},
    {"top_k": 2**70, "top_p": 0.99999999},
    {"min_p": 1.0},
    {"min_p": 0.99999999, "top_p": 0.99999999},
    {"min_p": 1e-60, "top_p": 0.9},
    {"temperature": 1e-60, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 1e-45, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 1e300, "top_p": 0.99999999, "top_k": 20},
    {"temperature": 1e300, "min_p": 0.5},
]


@pytest.mark.parametrize("seen", [VOCAB_SIZE, 1], ids=["all tokens", "all but one are impossible"])
@pytest.mark.parametrize("fields", BORDERS, ids=str)
def test_a_value_that_float32_rounds_away_harms_neither_its_row_nor_a_neighbour(fields, seen):
    raw = random_logits(4)
    raw[:, seen:] = -math.inf
    rows = [sequence(*HISTORY, seed=i, **one) for i, one in enumerate([{}, fields, fields, {"top_k": 2}])]
    together = draw(raw, sampling_of(rows))
    alone = [int(draw(raw[i : i + 1], sampling_of([seq]))) for i, seq in enumerate(rows)]
    assert together.tolist() == alone
    # what float64 draws from; float32's temperatures end at 3.4e38, where all that may be drawn is as likely
    assert all(
        ROWS.expected_probs(raw[i], seq)[token] > 0 for i, (seq, token) in enumerate(zip(rows, alone, strict=True))
    )


# ---- greedy


def test_greedy_rows_among_random_ones():
    """Truncation never removes the likeliest token, and 200 draws of other rows do not change the greedy rows."""
    greedy = [{}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.9}, {"seed": 3}, {"top_p": 1e-6}]
    rows = []
    for fields in greedy:
        rows += [sequence(temperature=0, **fields), sequence(temperature=5.0)]
    raw = random_logits(len(rows))
    shares = ROWS.drawn_shares(raw, rows, 200)
    assert shares[::2].argmax(dim=-1).tolist() == raw[::2].argmax(dim=-1).tolist()
    assert (shares[::2].amax(dim=-1) == 1).all()
    assert (shares[1::2].amax(dim=-1) < 1).all()


def test_the_first_of_equally_likely_tokens_is_greedy_whoever_is_in_the_batch():
    raw = torch.tensor([[0.0, 2.0, 1.0, 2.0]] * 2)
    for rows in ([sequence(temperature=0)] * 2, [sequence(temperature=0), sequence(temperature=1.0)]):
        assert int(draw(raw, sampling_of(rows))[0]) == 1


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-8, 1e-20, 1e-37, 1e-38, 1e-40, 1e-45, 1e-60])
def test_the_lower_the_temperature_the_greedier(temperature):
    """No legal temperature is too low: what it makes of the logits may be infinite, but it has a limit."""
    raw = random_logits(20, scale=10.0)
    token_ids = draw(raw, sampling_of([sequence(temperature=temperature, seed=i) for i in range(20)]))
    assert token_ids.tolist() == raw.argmax(dim=-1).tolist()


# ---- draws


@pytest.mark.parametrize(
    "kind",
    list(enumerate([{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}])),
)
def test_frequencies_follow_the_distribution(kind):
    ROWS.assert_frequencies_follow_the_distribution(*kind)


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


# ---- short paths


@pytest.mark.parametrize("temperatures", [[0, 0, 0], [0.7, 1.0, 2.0], [0, 1.0, 0]])
def test_plain_rows_touch_no_slow_path(temperatures, monkeypatch):
    """No truncation is called for nothing, and no copy is made."""

    def fail(*_):
        pytest.fail("a truncation that no row asks for was run")

    truncations = {"apply_min_p", "apply_top_k", "apply_top_p"}
    assert {name for name in dir(sampler) if name.startswith("apply_")} == truncations
    for name in truncations:
        monkeypatch.setattr(sampler, name, fail)
    raw = random_logits(3)
    batch = sampling_of([sequence(temperature=t) for t in temperatures])
    assert truncate(raw, batch) is raw
    draw(raw, batch)


def test_a_greedy_batch_is_an_argmax_alone(monkeypatch):
    monkeypatch.setattr(sampler, "invert_distribution", lambda *_: pytest.fail("a greedy batch has nothing to draw"))
    raw = random_logits(4)
    token_ids = draw(raw, sampling_of([sequence(temperature=0)] * 4))
    assert token_ids.tolist() == raw.argmax(dim=-1).tolist()


def test_half_precision_logits_are_drawn_in_float32():
    raw = random_logits(6).bfloat16()
    rows = [sequence(temperature=t, seed=i, top_p=0.9) for i, t in enumerate([0, 1.0, 0, 2.0, 0.5, 1.0])]
    assert draw(raw, sampling_of(rows)).tolist() == draw(raw.float(), sampling_of(rows)).tolist()
    assert draw(raw, sampling_of([sequence(temperature=0)] * 6)).tolist() == raw.argmax(dim=-1).tolist()
