"""`build_sampling_batch` and `draw_uniforms`: what the rows of a step ask for, and the numbers that decide their draws.

Oracles: published values of SplitMix64, chi-square and Kolmogorov-Smirnov tests for the uniform distribution, and
tables worked out by hand. Nothing here is random from run to run: the seeds are fixed.

Seen to fail when broken: seed, sample index or position left out of the hash, or added without mixing; a number drawn
from a generator, so that it depends on the order.
"""

import functools

import numpy as np
import pytest
import torch

from nanovllm.batch import mix
from nanovllm_testing.sampling_rows import Rows
from nanovllm_testing.steps import sampling_of, uniforms_of

sequence = Rows().sequence


def at(seed, sample_index, position):
    """A sequence before its `position`-th output token."""
    seq = sequence(seed=seed, sample_index=sample_index)
    seq.token_ids.extend([0] * position)
    return seq


# --- uniform numbers -------------------------------------------------------------------------------------------------


def test_the_hash_is_splitmix64():
    """The first numbers of the reference implementation for seeds 0 and 1234567."""
    golden = 0x9E3779B97F4A7C15
    states = [0, golden, 1234567, 1234567 + golden, (1234567 + 2 * golden) % 2**64]
    expected = [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert mix(np.array(states, dtype=np.uint64)).tolist() == expected


def test_the_largest_hash_is_below_one_and_the_smallest_is_zero(monkeypatch):
    for bits, expected in ((2**64 - 1, 1 - 2.0**-52), (0, 0.0)):
        monkeypatch.setattr("nanovllm.batch.mix", lambda x, bits=bits: np.full_like(x, bits))
        assert uniforms_of([at(5, 0, 0)]).tolist() == [expected]


def test_position_counts_output_tokens_only():
    """Two prompts of different lengths draw the same: only the seed decides."""
    short, long = sequence([1], [5, 6], seed=7), sequence(range(40), [8, 9], seed=7)
    assert uniforms_of([short]).tolist() == uniforms_of([long]).tolist() == uniforms_of([at(7, 0, 2)]).tolist()


AXES = {
    "seeds": lambda i: (i, 0, 0),
    "far apart seeds": lambda i: (i << 40, 0, 0),
    "samples": lambda i: (9, i, 4),
    "positions": lambda i: (9, 0, i),
    "all three": lambda i: (i % 12, i // 12 % 12, i // 144),
}


NUM_DRAWS = 2048


@functools.cache
def uniforms_along(axis):
    return uniforms_of([at(*AXES[axis](i)) for i in range(NUM_DRAWS + 1)])


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_axis(axis):
    """Kolmogorov-Smirnov: the largest distance from the diagonal stays below its 99.9 % quantile."""
    uniforms = np.sort(uniforms_along(axis)[:NUM_DRAWS])
    steps = np.arange(NUM_DRAWS + 1) / NUM_DRAWS
    distance = max((steps[1:] - uniforms).max(), (uniforms - steps[:-1]).max())
    assert distance * NUM_DRAWS**0.5 < 1.95


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis):
    """Chi-square on a grid of 8 x 8 for pairs of neighbours; 103.4 is the 99.9 % quantile for 63 degrees of freedom."""
    uniforms = uniforms_along(axis)
    cells = (uniforms[:-1] * 8).astype(int) * 8 + (uniforms[1:] * 8).astype(int)
    counts = np.bincount(cells, minlength=64)
    expected = NUM_DRAWS / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4


# --- nothing asked, nothing made -------------------------------------------------------------------------------------

SPECIAL = ("top_k", "top_p", "min_p")


def assert_nothing_special(batch):
    assert [name for name in SPECIAL if getattr(batch, name) is not None] == []


def test_plain_rows_ask_for_nothing():
    rows = [
        sequence(temperature=0),
        sequence(temperature=0.7),
        sequence(seed=3, n=2, stop_token_ids=[5], ignore_eos=True, top_k=-1),
        sequence(stop=["x"]),
    ]
    batch = sampling_of(rows)
    assert_nothing_special(batch)
    torch.testing.assert_close(batch.temperatures, torch.tensor([0, 0.7, 1, 1]), rtol=0, atol=0)
    assert batch.uniforms.tolist() == uniforms_of(rows).tolist()


def test_greedy_rows_need_no_truncation():
    """Top-k, top-p and min-p never take away the likeliest token."""
    batch = sampling_of([sequence(temperature=0, top_k=3, top_p=0.5, min_p=0.2)] * 2)
    assert batch.uniforms is None
    batch = sampling_of([sequence(temperature=0, top_k=3), sequence(temperature=1e-9)])
    assert (batch.uniforms is None, batch.top_k) == (False, None), "1e-9 is not greedy"
    assert sampling_of([sequence(temperature=1e-9, top_k=3)]).top_k.tolist() == [3]
    batch = sampling_of([sequence(temperature=0, top_k=3, top_p=0.5, min_p=0.2)] * 2)
    assert (batch.top_k, batch.top_p, batch.min_p) == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, []),
        ({"top_k": -1}, []),
        ({"top_k": 1}, ["top_k"]),
        ({"top_p": 0.9}, ["top_p"]),
        ({"min_p": 0.1}, ["min_p"]),
    ],
    ids=str,
)
def test_a_truncation_is_there_if_a_row_needs_it(fields, wanted):
    batch = sampling_of([sequence(), sequence(**fields)])
    assert [name for name in ("top_k", "top_p", "min_p") if getattr(batch, name) is not None] == wanted


# --- columns ---------------------------------------------------------------------------------------------------------


def test_columns_have_neutral_values_for_rows_that_ask_for_nothing():
    batch = sampling_of([sequence(), sequence(top_k=5), sequence(top_p=0.5, top_k=-1), sequence(min_p=0.25)])
    assert batch.top_k.tolist() == [0, 5, -1, 0]  # 0 and -1 are all
    assert batch.top_p.tolist() == [1, 1, 0.5, 1]
    assert batch.min_p.tolist() == [0, 0, 0, 0.25]


def test_a_top_k_that_no_tensor_holds_is_all():
    batch = sampling_of([sequence(top_k=5), sequence(top_k=2**70), sequence(top_k=2**63 - 1)])
    assert batch.top_k.tolist() == [5, 2**63 - 1, 2**63 - 1]
