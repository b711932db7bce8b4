"""`sample_tokens` in Triton against a definition in float64 that sorts nothing and adds up one number after the other.

Two correct programs may disagree where a row's uniform number, or a limit, falls on a border between two tokens; so the
definition also tells how far the next border is, and tokens have to be equal where it is farther than rounding can
reach. Small chunks represent a large vocabulary, and a small capacity sends rows through every step of the bisection.
Where the tests run, and with what in memory: `on_device.py`.
"""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import sampler
from nanovllm.batch import SamplingBatch
from nanovllm_extras.kernels.cuda import sample
from nanovllm_extras.sampling.processed_batch import ProcessedSampling, values_of
from nanovllm_extras.sampling.runner_hooks import draw_arguments
from nanovllm_extras.sampling.runner_hooks import sample as sample_and_judge
from tests.conftest import every_second, examples
from tests.extras.kernels.on_device import DEVICE, IS_INTERPRETED, only_on_gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of numbers that are masked afterwards
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]
BORDER = 2e-6  # a share of the whole: what rounding can reach
LAST = 1 - 2.0**-52  # the largest uniform number


# ---- the definition


def define(logits, temperature, uniform, min_p=0.0, top_k=0, top_p=1.0):
    """logits: [vocab_size] -> the row's token, its probabilities, and the distance of the next border"""
    x = logits.astype(np.float64)
    if temperature == 0:
        return int(x.argmax()), 1.0 * (np.arange(len(x)) == x.argmax()), math.inf
    largest, margins = x.max(), [math.inf]
    kept = x > -math.inf
    if min_p > 0:
        limit = largest + temperature * math.log(min_p)
        if min_p < 1:
            margins.append(np.min(abs(x[kept] - limit)) / (abs(largest) + abs(limit)))
        kept &= x >= limit
    if 0 < top_k < kept.sum():
        kept &= x >= np.sort(x[kept])[-top_k]
    if top_p < 1:
        weights = np.where(kept, np.exp((x - largest) / temperature), 0)
        values, which = np.unique(-x, return_inverse=True)  # likeliest first
        from_there_on = np.cumsum(np.bincount(which, weights)) / weights.sum()
        margins.append(np.min(abs(from_there_on - top_p)))
        kept &= x >= -values[np.argmax(from_there_on >= top_p)]
    weights = np.where(kept, np.exp((x - largest) / temperature), 0)
    cumulative = np.cumsum(weights)
    shares = cumulative / cumulative[-1]
    borders = shares[(shares > 0) & (cumulative < cumulative[-1])]
    margins.append(np.min(abs(borders - uniform), initial=math.inf))
    token = min(int(np.searchsorted(shares, uniform, side="right")), int(np.flatnonzero(weights)[-1]))
    return token, weights / weights.sum(), min(margins)


def make_batch(temperatures, uniforms, min_p=None, top_k=None, top_p=None):
    """Lists, as the tensors of a step."""

    def tensor(values, dtype):
        return None if values is None else torch.tensor(values, dtype=dtype, device=DEVICE)

    return SamplingBatch(
        temperatures=tensor(temperatures, torch.float32),
        uniforms=tensor(uniforms, torch.float64),
        min_p=tensor(min_p, torch.float32),
        top_k=tensor(top_k, torch.int64),
        top_p=tensor(top_p, torch.float32),
    )


def arguments_of_row(batch, row):
    """What `define` takes, as the numbers that the tensors really hold."""
    names = {"temperatures": "temperature", "uniforms": "uniform", "min_p": "min_p", "top_k": "top_k", "top_p": "top_p"}
    columns = {name: getattr(batch, column) for column, name in names.items()}
    arguments = {name: column[row].item() for name, column in columns.items() if column is not None}
    return {"uniform": 0.0, **arguments}


def random_logits(num_rows, vocab_size, dtype=torch.float32, seed=0, scale=2.0):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.to(DEVICE, dtype)


def random_uniforms(num_rows, seed=0):
    return torch.rand(num_rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def assert_as_defined(logits, batch, chunk=128, group=2, capacity=64, least=0.9):
    """Against the definition, and against PyTorch if its sums are exact enough; `least` rows are on no border."""
    before = logits.clone()
    token_ids = sample.sample_tokens(logits, *draw_arguments(batch), chunk, group, capacity)
    assert token_ids.dtype == torch.int64
    assert token_ids.shape == logits.shape[:1]
    assert torch.equal(logits, before)
    in_torch = None
    if logits.shape[1] < 10_000:
        in_torch = sampler.sample_tokens(logits.cpu(), *draw_arguments(batch_on_cpu(batch))).tolist()
    num_clear = 0
    for row, token_id in enumerate(token_ids.tolist()):
        arguments = arguments_of_row(batch, row)
        expected, probs, margin = define(logits[row].float().cpu().numpy(), **arguments)
        assert 0 <= token_id < logits.shape[1]
        if margin > BORDER:
            assert token_id == expected, (row, arguments)
            assert in_torch is None or token_id == in_torch[row], (row, arguments)
            assert probs[token_id] > 0
            num_clear += 1
    assert num_clear >= least * len(token_ids)


def batch_on_cpu(batch):
    columns = ("temperatures", "uniforms", "min_p", "top_k", "top_p")
    present = {name: getattr(batch, name) for name in columns}
    return replace(batch, **{name: column if column is None else column.cpu() for name, column in present.items()})


# ---- all kinds of rows

KINDS = [
    {},
    {"temperature": 0},
    {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 60, "top_p": 0.9},
    {"top_k": 400},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 1e-9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.7},
    {"min_p": 1e-6, "top_k": 700, "top_p": 0.99, "temperature": 2.5},
    {"temperature": 0.05},
    {"temperature": 40.0, "top_k": 1000},
]


def batch_of(kinds, uniforms):
    def column(name, neutral):
        return [kind.get(name, neutral) for kind in kinds]

    return make_batch(column("temperature", 0.8), uniforms, column("min_p", 0), column("top_k", 0), column("top_p", 1))


@pytest.mark.parametrize(
    ("dtype", "chunk", "group", "capacity"),
    [
        (torch.bfloat16, 128, 2, 32),
        pytest.param(torch.float16, 512, 2, 256, marks=pytest.mark.slow),
        pytest.param(torch.float32, 128, 4, 64, marks=pytest.mark.slow),
    ],
)
def test_rows_of_all_kinds(dtype, chunk, group, capacity):
    logits = random_logits(len(KINDS), 1200, dtype)
    assert_as_defined(logits, batch_of(KINDS, random_uniforms(len(KINDS), chunk)), chunk, group, capacity, least=0.8)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("shift", [-500.0, 0.0, 500.0])
@pytest.mark.sparse
def test_logits_of_any_size(scale, shift):
    kinds = [{**kind, "temperature": kind.get("temperature", 1) * scale} for kind in KINDS[1::2]]
    logits = random_logits(len(kinds), 600, scale=scale) + shift
    assert_as_defined(logits, batch_of(kinds, random_uniforms(len(kinds))), least=0.7)


# on a GPU, each power of two of chunks is a compilation of its own: the sweep has all five
with_more_in_the_sweep = (lambda test: test) if IS_INTERPRETED else pytest.mark.examples
VOCAB_SIZES = st.integers(1, 900) if IS_INTERPRETED or os.environ.get("NANOVLLM_SWEEP") else st.integers(513, 900)
ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7, 10.0]),
        "top_k": st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 900)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-5, 1.0)),
        "uniform": st.one_of(st.just(0.0), st.just(LAST), st.floats(0, LAST)),
    }
)


@with_more_in_the_sweep
@settings(max_examples=8 if IS_INTERPRETED else examples(300), deadline=None, derandomize=True)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=4),
    vocab_size=VOCAB_SIZES,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    num_values=st.sampled_from([2, 30, 10**6]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_any_mixture(rows, vocab_size, dtype, seed, num_values, masked):
    """Among them rows of few different values, and rows most of which is masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 3
    logits = (logits * num_values).round() / num_values
    is_masked = torch.rand(len(rows), vocab_size, generator=generator) < masked
    is_masked[:, -1] = False
    logits = logits.masked_fill(is_masked, -math.inf).to(DEVICE, dtype)
    assert_as_defined(logits, batch_of(rows, [row["uniform"] for row in rows]), chunk=64, capacity=32, least=0)


@pytest.mark.parametrize("names", [(), ("top_k",), ("top_p", "min_p")])
def test_what_no_row_asks_for_is_none(names):
    values = {"top_k": [0, 20, 3, 0], "top_p": [0.5, 1.0, 0.9, 1.0], "min_p": [0.0, 0.1, 0.0, 0.3]}
    batch = make_batch([0, 1.0, 0.7, 1.3], random_uniforms(4), **{name: values[name] for name in names})
    assert_as_defined(random_logits(4, 700), batch)


# ---- shares


@pytest.mark.parametrize(
    ("kind", "num_points"),
    [
        ({"top_k": 7, "top_p": 0.8}, 25),
        pytest.param({}, 100, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.2}, 40, marks=pytest.mark.slow),
    ],
)
def test_each_token_has_its_share_of_an_even_grid(kind, num_points):
    logits = random_logits(1, 50, torch.float16, seed=3)
    uniforms = [(i + 0.5) / num_points for i in range(num_points)]
    batch = batch_of([kind] * num_points, uniforms)
    token_ids = sample.sample_tokens(logits.expand(num_points, -1), *draw_arguments(batch), chunk=16, capacity=16)
    shares = torch.bincount(token_ids, minlength=50).cpu().numpy() / num_points
    _, expected, _ = define(logits[0].cpu().numpy(), np.float32(0.8), 0.5, **kind)
    assert abs(shares - expected).max() < 1.01 / num_points
    assert not shares[expected == 0].any()
    assert token_ids.tolist() == sorted(token_ids.tolist())


@pytest.mark.parametrize("kind", [{}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 70, "top_p": 0.9}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sparse
def test_all_tokens_equally_likely(dtype, kind):
    """All are as likely as the k-th: none is left out, and the token is the uniform number's."""
    uniforms = [0.0, 0.1003, 0.5001, 0.9997, LAST]
    logits = torch.full((len(uniforms), 1001), 1.5, dtype=dtype, device=DEVICE)
    token_ids = sample.sample_tokens(
        logits, *draw_arguments(batch_of([kind] * len(uniforms), uniforms)), chunk=128, capacity=64
    )
    assert token_ids.tolist() == [int(u * 1001) for u in uniforms]


@pytest.mark.parametrize("kind", every_second([{"top_p": 0.99}, {"min_p": 0.5}, {}, {"top_k": 2}]))
def test_tokens_of_weight_zero_are_never_drawn(kind):
    """Neither masked ones nor those that are too unlikely for a number, whatever the uniform number."""
    logits = torch.full((4, 300), -math.inf, device=DEVICE)
    logits[1::2] = -1e30
    logits[:, [70, 201]] = 3.0
    uniforms = [0.0, 2.0**-52, 0.5 - 2.0**-40, LAST]
    token_ids = sample.sample_tokens(logits, *draw_arguments(batch_of([kind] * 4, uniforms)), chunk=64, capacity=16)
    assert token_ids.tolist() == [70, 70, 70, 201]


def test_minus_zero_is_as_likely_as_zero():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0, 0.0]] * 4, device=DEVICE)
    for dtype in DTYPES:
        for kind in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
            batch = batch_of([kind] * 4, [0.1, 0.3, 0.6, 0.9])
            token_ids = sample.sample_tokens(logits.to(dtype), *draw_arguments(batch), chunk=4, capacity=4)
            assert token_ids.tolist() == [1, 2, 3, 5]


def test_a_min_p_limit_between_two_numbers_of_the_dtype():
    """In bfloat16, 3 follows 2.984375, and the limit 4 + ln(min_p) is 2.99; -3 and -3.015625 are as close."""
    for numbers, min_p in (([2.984375, 4.0, 3.0], math.exp(-1.01)), ([-3.015625, -2.0, -3.0], math.exp(-1.01))):
        logits = torch.tensor([numbers] * 2, device=DEVICE)
        batch = make_batch([1.0] * 2, [0.0, LAST], min_p=[min_p] * 2)
        for dtype in DTYPES:
            assert sample.sample_tokens(logits.to(dtype), *draw_arguments(batch), chunk=4, capacity=4).tolist() == [
                1,
                2,
            ]


# ---- greedy


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_the_first_of_the_likeliest(dtype):
    logits = random_logits(6, 1000, dtype)
    for row, places in enumerate([[999], [0, 999], [127, 128], [128, 640], [5, 6], [300]]):
        logits[row, places] = 50.0
    expected = [999, 0, 127, 128, 5, 300]
    assert sample.sample_tokens(logits, *draw_arguments(make_batch([0.0] * 6, None)), chunk=128).tolist() == expected
    mixed = make_batch([0.0, 1e-4] * 3, [0.1] * 6, top_k=[0, 0, 4, 4, 0, 1])
    assert sample.sample_tokens(logits, *draw_arguments(mixed), chunk=128).tolist() == expected
    assert sample.sample_tokens(
        -logits.abs() - 1, *draw_arguments(make_batch([0.0] * 6, None)), chunk=128
    ).tolist() == ((-logits.abs() - 1).argmax(dim=-1).tolist())


@pytest.mark.parametrize("temperature", every_second([1e-2, 1e-20, 1e-45, 1e-38]))
def test_the_lower_the_temperature_the_greedier(temperature):
    logits = random_logits(4, 300, scale=10.0)
    batch = make_batch([temperature] * 4, [0.0, 0.5, 0.9, LAST], [0, 0, 0.1, 0], [0, 5, 0, 0], [1, 1, 1, 0.9])
    assert (
        sample.sample_tokens(logits, *draw_arguments(batch), chunk=64, capacity=16).tolist()
        == logits.argmax(dim=-1).tolist()
    )


# ---- shapes


@pytest.mark.parametrize("vocab_size", [1, 64, 65, *every_second([129, 63, 2, 1000])])
def test_vocabularies_need_not_be_multiples_of_a_chunk(vocab_size):
    kinds = [{}, {"temperature": 0}, {"top_k": vocab_size}, {"top_k": 10**9, "top_p": 0.8}, {"top_k": 3}]
    for uniform in (0.3, LAST):
        batch = batch_of(kinds, [uniform] * len(kinds))
        assert_as_defined(random_logits(len(kinds), vocab_size), batch, chunk=64, least=0.6)


def test_any_strides_and_dtypes():
    padded = random_logits(10, 999, scale=3.0)
    batch = batch_of(KINDS[4:8:2], random_uniforms(2, 2))
    views = (padded[:2, :700], padded[::5, 3:703], padded[:2, ::2], padded[:2].double(), padded[:1].expand(2, -1))
    for logits in views:
        assert_as_defined(logits, batch, least=1.0)
    assert sample.sample_tokens(padded[:0], *draw_arguments(make_batch([], None))).shape == (0,)


# ---- rows do not see each other


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_row_is_the_same_alone_and_in_any_batch(dtype):
    """To the last bit, so that no uniform number can tell: those on a border between two tokens are tried too."""
    logits = random_logits(len(KINDS), 700, dtype)
    uniforms = random_uniforms(len(KINDS), 5)
    together = sample.sample_tokens(logits, *draw_arguments(batch_of(KINDS, uniforms)), chunk=128, capacity=64).tolist()
    backwards = batch_of(KINDS[::-1], uniforms[::-1])
    assert (
        sample.sample_tokens(logits.flip(0), *draw_arguments(backwards), chunk=128, capacity=64).tolist()
        == together[::-1]
    )
    for row in range(0, len(KINDS), 4):
        alone = batch_of(KINDS[row : row + 1], uniforms[row : row + 1])
        assert sample.sample_tokens(logits[row : row + 1], *draw_arguments(alone), chunk=128, capacity=64).tolist() == [
            together[row]
        ]


@pytest.mark.parametrize("kind", every_second([{"top_k": 5}, {}, {"min_p": 0.1, "top_p": 0.5}]))
def test_logits_that_are_no_numbers_harm_nobody(kind):
    """NaN is impossible; a row of nothing but NaN, or with infinity, gets some token of the vocabulary."""
    good = random_logits(2, 300, seed=9)
    some_nan = good[:1].clone()
    some_nan[0, 1::3] = math.nan
    impossible = good[:1].clone()
    impossible[0, 1::3] = -math.inf
    rows = [good, some_nan, impossible, torch.full_like(some_nan, math.nan), torch.full_like(some_nan, -math.inf)]
    infinite = good[:1].clone()
    infinite[0, 200] = math.inf
    logits = torch.cat([*rows, infinite])
    batch = batch_of([kind] * len(logits), [0.7] * len(logits))
    token_ids = sample.sample_tokens(logits, *draw_arguments(batch), chunk=64, capacity=16).tolist()
    assert all(0 <= token_id < 300 for token_id in token_ids)
    alone = sample.sample_tokens(good, *draw_arguments(batch_of([kind] * 2, [0.7] * 2)), chunk=64, capacity=16).tolist()
    assert token_ids[:2] == alone
    assert token_ids[2] == token_ids[3]
    assert token_ids[-1] == 200
    greedy = sample.sample_tokens(logits, *draw_arguments(make_batch([0.0] * len(logits), None)), chunk=64).tolist()
    assert all(0 <= token_id < 300 for token_id in greedy)


# ---- in the engine


def test_sample_takes_it():
    logits = random_logits(4, 300)
    batch = ProcessedSampling(**values_of(batch_of(KINDS[4:8], random_uniforms(4))), num_logprobs=2)
    token_ids, logprobs = sample_and_judge(logits, batch, draw=sample.sample_tokens)
    expected, _ = sample_and_judge(logits, batch, sampler.sample_tokens)
    assert torch.equal(token_ids, expected)
    assert logprobs.chosen.shape == (4,)


@only_on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_a_real_vocabulary(dtype, scale):
    kinds = (KINDS + [{"top_k": k} for k in (20, 75, 76, 1000, 50_000)]) * 3
    logits = random_logits(len(kinds), 151_936, dtype, scale=scale)
    batch = batch_of(kinds, random_uniforms(len(kinds)))
    assert_as_defined(logits, batch, sample.CHUNK, sample.GROUP, sample.CAPACITY, least=0.5)


@only_on_gpu
def test_one_graph_for_all_mixtures():
    """Captured for greedy rows, replayed for others; nothing waits for the GPU on the way."""
    num_rows = 32
    kinds = (KINDS * 2)[:num_rows]
    logits = random_logits(num_rows, 151_936, torch.bfloat16)
    batch = batch_of([{"temperature": 0}] * num_rows, [0.0] * num_rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample.sample_tokens(logits, *draw_arguments(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sample.sample_tokens(logits, *draw_arguments(batch))
    for seed in range(3):
        new = batch_of(kinds[seed:] + kinds[:seed], random_uniforms(num_rows, seed))
        for name in ("temperatures", "uniforms", "min_p", "top_k", "top_p"):
            getattr(batch, name).copy_(getattr(new, name))
        logits.copy_(random_logits(num_rows, 151_936, torch.bfloat16, seed))
        graph.replay()
        assert torch.equal(token_ids, sample.sample_tokens(logits, *draw_arguments(new)))
