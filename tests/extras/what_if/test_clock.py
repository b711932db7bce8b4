"""The clock: its fit is the best one without negative costs, and its error is that of steps it has not seen."""

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


@pytest.mark.parametrize("seed", range(20))
def test_no_other_costs_without_negative_ones_are_better(seed):
    """The conditions of Karush, Kuhn and Tucker: no gain where a cost is positive, only loss where it is 0."""
    steps = random_steps(random.Random(seed), noise=1.5)
    costs = costs_of(fit_clock(steps))
    rows = np.array([[1, one.num_tokens, one.num_context_tokens] for one in steps]) / [[one.seconds] for one in steps]
    scale = np.linalg.norm(rows, axis=0)
    gradient = rows.T @ (rows @ costs - 1) / scale
    assert (costs >= 0).all()
    np.testing.assert_allclose(gradient[costs > 0], 0, atol=1e-7)
    assert (gradient[costs == 0] >= -1e-7).all()


def test_the_error_is_that_of_each_step_by_a_fit_to_the_others():
    steps = random_steps(random.Random(5), noise=0.3)[:12] + random_steps(random.Random(6), noise=0.3)[:6]
    errors = []
    for i, one in enumerate(steps):
        clock = fit_clock(steps[:i] + steps[i + 1 :])
        errors.append(abs(clock.seconds(one.num_tokens, one.num_context_tokens) / one.seconds - 1))
    clock = fit_clock(steps)
    assert (clock.mean_error, clock.median_error) == pytest.approx((np.mean(errors), np.median(errors)))


def test_a_clock_is_good_up_to_20_percent():
    assert FittedClock(1, 0, 0, 9, mean_error=0.2, median_error=0.1).is_good
    assert not FittedClock(1, 0, 0, 9, mean_error=0.201, median_error=0.1).is_good
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
