"""The clock: its fit is the best one without negative costs, its total is right, and its errors are of unseen steps."""

import random

import numpy as np
import pytest

from nanovllm_extras.what_if.clock import FittedClock, Machine, StepCost, fit_clock
from nanovllm_extras.what_if.figures import percentile


def random_steps(rng, noise):
    steps = []
    for _ in range(rng.randrange(8, 30)):
        tokens, context = rng.randrange(1, 500), rng.randrange(1, 50_000)
        seconds = (2e-3 + 4e-6 * tokens + 3e-8 * context) * rng.lognormvariate(0, noise)
        steps.append(StepCost(tokens, context, seconds))
    return steps


def costs_of(clock):
    return np.array([clock.per_step, clock.per_token, clock.per_context_token])


def test_exact_times_give_the_exact_costs():
    clock = fit_clock(random_steps(random.Random(0), noise=0))
    np.testing.assert_allclose(costs_of(clock), [2e-3, 4e-6, 3e-8], rtol=1e-6)
    assert clock.mean_error < 1e-6
    assert clock.is_good
    assert clock.seconds(100, 1000) == pytest.approx(2e-3 + 4e-4 + 3e-5)


def arrays_of(steps):
    """One row of (1, tokens, context) for each step, and the times."""
    rows = np.array([[1.0, one.num_tokens, one.num_context_tokens] for one in steps])
    return rows, np.array([one.seconds for one in steps])


def fit_by_numpy(rows, times, weights):
    """The non-negative costs with the smallest weighted squared error: the best of all choices of costs above 0."""
    scale = np.sqrt(weights)
    best = (np.inf, np.zeros(3))
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        costs = np.zeros(3)
        costs[chosen] = np.linalg.lstsq(rows[:, chosen] * scale[:, None], times * scale, rcond=None)[0]
        if (costs >= 0).all():
            best = min(best, (np.sum(weights * (rows @ costs - times) ** 2), costs), key=lambda one: one[0])
    return best[1]


@pytest.mark.parametrize("seed", range(10))
def test_no_other_costs_are_better_with_these_weights(seed):
    """The weights are those of the fit itself, so a fit of NumPy with them must find the same costs again."""
    steps = random_steps(random.Random(seed), noise=0.5)
    clock = fit_clock(steps)
    rows, times = arrays_of(steps)
    again = fit_by_numpy(rows, times, 1 / (rows @ costs_of(clock)))
    np.testing.assert_allclose(rows @ costs_of(clock), rows @ again, rtol=1e-5)


@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_the_predictions_add_up_to_the_time_of_all_steps(noise):
    """For steps whose noise is known to be large, and costs of 0 among the best ones."""
    for seed in range(10):
        steps = random_steps(random.Random(seed), noise)
        rows, times = arrays_of(steps)
        assert sum(rows @ costs_of(fit_clock(steps))) == pytest.approx(sum(times), rel=1e-6)


def test_the_total_of_other_steps_is_not_biased():
    """Steps with known costs and a noise whose mean is known. A fit of squared relative errors is 24 % too small."""
    rng, ratios, noise = random.Random(0), [], 0.4
    for _ in range(40):
        clock = fit_clock([one for _ in range(5) for one in random_steps(rng, noise)])
        tokens, context = rng.randrange(1, 500), rng.randrange(1, 50_000)
        mean = (2e-3 + 4e-6 * tokens + 3e-8 * context) * np.exp(noise**2 / 2)
        ratios.append(clock.seconds(tokens, context) / mean)
    assert np.mean(ratios) == pytest.approx(1, abs=0.03)


def test_the_errors_are_those_of_fits_to_the_other_steps():
    """Each step by the others, with the weights of all; and each quarter of the run by a fit to the other quarters."""
    steps = random_steps(random.Random(5), noise=0.3)[:12] + random_steps(random.Random(6), noise=0.3)[:7]
    clock = fit_clock(steps)
    rows, times = arrays_of(steps)
    weights = 1 / (rows @ costs_of(clock))
    others = [np.arange(len(steps)) != i for i in range(len(steps))]
    predicted = [rows[i] @ fit_by_numpy(rows[kept], times[kept], weights[kept]) for i, kept in enumerate(others)]
    errors = abs(predicted / times - 1)
    assert (clock.mean_error, clock.median_error) == pytest.approx((np.mean(errors), np.median(errors)))
    totals = []
    for part in (slice(0, 4), slice(4, 9), slice(9, 14), slice(14, 19)):
        costs = costs_of(fit_clock(steps[: part.start] + steps[part.stop :]))
        totals.append(abs(sum(rows[part] @ costs) / sum(times[part]) - 1))
    assert clock.total_error == pytest.approx(max(totals))


def test_a_clock_is_good_up_to_20_percent():
    assert FittedClock(1, 0, 0, 9, mean_error=0.2, median_error=0.1, total_error=0.3).is_good
    assert not FittedClock(1, 0, 0, 9, mean_error=0.201, median_error=0.1, total_error=0.1).is_good
    with pytest.raises(ValueError, match=r"at least 8 steps, and the recording has 7.*--bandwidth"):
        fit_clock(random_steps(random.Random(0), 0)[:7])


def test_a_machine_takes_the_longer_of_reading_and_computing():
    """By hand: 16 GB of weights at 2 TB/s are 8 ms, and 1,000 tokens of 100 kB more are 0.05 ms."""
    machine = Machine(2e12, 4e14, 16e9, kv_bytes_per_token=1e5, step_overhead=1e-3)
    assert machine.seconds(1, 1000) == pytest.approx(1e-3 + 8.05e-3)
    assert machine.seconds(2000, 1000) == pytest.approx(1e-3 + 16e9 * 2000 / 4e14)
    with pytest.raises(ValueError, match="bandwidth must be a finite number > 0"):
        Machine(0, 1, 1)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_percentiles_are_those_of_numpy(size):
    values = sorted(random.Random(size).random() for _ in range(size))
    for percent in (0, 50, 75, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
