"""How long does a step take? A clock that is fitted to a recording's steps, or that of a machine given by hand.

`FittedClock` knows three costs: of a step, of each token that it computes, and of each token of context that it reads
(`context_of`). They are non-negative numbers, fitted by weighted least squares. The square of each error is divided by
the predicted time of its step, so the predictions add up to the time of all steps. That matters, because TTFT, TPOT and
the time of a run are sums over steps. Divided by the square of the measured time, predictions are too small, because an
overestimate counts more. Without weights, the sum is right only if the cost of a step is above 0, and the longest steps
count most.

The stated errors are those of times that the fit has not seen, so a clock with few steps does not look better than it
is: each step is predicted by a fit to all other steps, and each quarter of the run by a fit to the other quarters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, pairwise
from math import fsum, sqrt
from typing import Protocol

from nanovllm.checks import check_number, checked, checks_of
from nanovllm.scheduler import Step

MAX_ERROR = 0.2
"""A clock with a larger mean relative error gives no times."""
MIN_STEPS = 8
NUM_PARTS = 4
"""Parts of the run whose total time is predicted by a fit to the other parts."""
MIN_SECONDS = 1e-12
"""The smallest time that a weight is made of: a step may be predicted to take no time."""
MAX_ROUNDS = 50
"""A fit needs about 10: each one fits the costs with the weights of the costs before."""


@dataclass(frozen=True)
class StepCost:
    """What a step does, and how long it took."""

    num_tokens: int
    num_context_tokens: int
    seconds: float


def context_of(step: Step) -> int:
    """Return the number of tokens whose K and V a step reads: for each chunk, those up to its end."""
    return sum([start + num_new_tokens for _, start, num_new_tokens in step.chunks])


class Clock(Protocol):
    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return how long a step takes."""

    @property
    def is_good(self) -> bool:
        """Return whether times may be shown."""

    def describe(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class FittedClock:
    """Seconds of a step, for each of its tokens, and for each token of context. `fit_clock` makes it."""

    per_step: float
    per_token: float
    per_context_token: float
    num_steps: int
    mean_error: float
    median_error: float
    total_error: float
    """The largest relative error of the time of a quarter of the run."""

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.per_step + self.per_token * num_tokens + self.per_context_token * num_context_tokens

    @property
    def is_good(self) -> bool:
        return self.mean_error <= MAX_ERROR

    def describe(self) -> dict[str, object]:
        return {
            "kind": "fitted",
            "per_step_s": self.per_step,
            "per_token_s": self.per_token,
            "per_context_token_s": self.per_context_token,
            "num_steps": self.num_steps,
            "mean_error": self.mean_error,
            "median_error": self.median_error,
            "total_error": self.total_error,
            "is_good": self.is_good,
        }


@dataclass(frozen=True)
class Machine:
    """A machine given by hand. A step takes the longer one of reading its bytes and computing, and `step_overhead`.

    A step reads all weights, and K and V of its context.
    """

    bandwidth: float = checked(0.0, check_number, low=0, open_low=True)
    """Bytes per second that the memory gives."""
    flops: float = checked(0.0, check_number, low=0, open_low=True)
    """Floating-point operations per second."""
    weight_bytes: float = checked(0.0, check_number, low=0, open_low=True)
    kv_bytes_per_token: float = checked(0.0, check_number, low=0)
    flops_per_token: float | None = None
    """None is `weight_bytes`: two operations for each weight of two bytes."""
    step_overhead: float = checked(0.0, check_number, low=0)
    """Seconds of each step in which the device waits."""

    def __post_init__(self) -> None:
        for name, check in checks_of(self).items():
            check(name, getattr(self, name))
        if self.flops_per_token is not None:
            check_number("flops_per_token", self.flops_per_token, low=0)

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        per_token = self.weight_bytes if self.flops_per_token is None else self.flops_per_token
        num_bytes = self.weight_bytes + self.kv_bytes_per_token * num_context_tokens
        return self.step_overhead + max(num_bytes / self.bandwidth, per_token * num_tokens / self.flops)

    @property
    def is_good(self) -> bool:
        return True

    def describe(self) -> dict[str, object]:
        return {
            "kind": "machine",
            "bandwidth": self.bandwidth,
            "flops": self.flops,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "flops_per_token": self.weight_bytes if self.flops_per_token is None else self.flops_per_token,
            "step_overhead": self.step_overhead,
        }


def fit_clock(steps: Sequence[StepCost]) -> FittedClock:
    """Return the clock that fits the steps best. Raises ValueError if they are fewer than `MIN_STEPS`."""
    steps = [step for step in steps if step.seconds > 0]
    if len(steps) < MIN_STEPS:
        raise ValueError(
            f"a clock needs the times of at least {MIN_STEPS} steps, and the recording has {len(steps)}; "
            f"give a machine by hand (--bandwidth, --flops, --weight-bytes)"
        )
    costs = fit_costs(steps)
    matrix, vector = make_equations(steps, costs)
    errors = []
    for step in steps:  # predicted by the other steps, with the weights of all
        own_matrix, own_vector = make_equations([step], costs)
        others = [[matrix[i][j] - own_matrix[i][j] for j in range(3)] for i in range(3)]
        own = solve_non_negative(others, [vector[i] - own_vector[i] for i in range(3)])
        errors.append(abs(predict(own, step) / step.seconds - 1))
    errors.sort()
    middle = (errors[len(errors) // 2] + errors[(len(errors) - 1) // 2]) / 2
    mean = fsum(errors) / len(errors)
    return FittedClock(costs[0], costs[1], costs[2], len(steps), mean, middle, find_total_error(steps))


def find_total_error(steps: Sequence[StepCost]) -> float:
    """Return the largest relative error of the time of a part of the run, predicted by a fit to the other parts."""
    ends = [len(steps) * i // NUM_PARTS for i in range(NUM_PARTS + 1)]
    errors = []
    for start, end in pairwise(ends):
        costs = fit_costs([*steps[:start], *steps[end:]])
        predicted = fsum([predict(costs, step) for step in steps[start:end]])
        errors.append(abs(predicted / fsum([step.seconds for step in steps[start:end]]) - 1))
    return max(errors)


def fit_costs(steps: Sequence[StepCost]) -> list[float]:
    """Return the costs of a step, a token and a token of context, whose sum over the steps is the time of all steps."""
    mean = fsum([step.seconds for step in steps]) / len(steps)
    costs = [mean, 0.0, 0.0]
    for _ in range(MAX_ROUNDS):
        before, costs = costs, solve_non_negative(*make_equations(steps, costs))
        if all(abs(new - old) <= 1e-9 * new for new, old in zip(costs, before, strict=True)):
            break
    return costs


def make_equations(steps: Sequence[StepCost], costs: Sequence[float]) -> tuple[list[list[float]], list[float]]:
    """Return the normal equations of the fit, each step divided by its time according to `costs`."""
    rows = [(1.0, float(step.num_tokens), float(step.num_context_tokens)) for step in steps]
    weights = [1 / max(predict(costs, step), MIN_SECONDS) for step in steps]
    matrix = [[0.0] * 3 for _ in range(3)]
    for i, j in combinations_with_replacement(range(3), 2):
        matrix[i][j] = matrix[j][i] = fsum([w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)])
    times = [w * step.seconds for w, step in zip(weights, steps, strict=True)]
    return matrix, [fsum([time * row[i] for time, row in zip(times, rows, strict=True)]) for i in range(3)]


def predict(costs: Sequence[float], step: StepCost) -> float:
    return costs[0] + costs[1] * step.num_tokens + costs[2] * step.num_context_tokens


def solve_non_negative(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Return the three costs, none negative, with the smallest squared error. The arguments are the normal equations.

    At the best costs, those above zero solve the equations without the others. So seven choices are tried.
    """
    best, best_gain = [0.0, 0.0, 0.0], 0.0
    for number in (1, 2, 3):
        for chosen in combinations(range(3), number):
            solved = solve([[matrix[i][j] for j in chosen] for i in chosen], [vector[i] for i in chosen])
            if solved is None or min(solved) < 0:
                continue
            gain = fsum(value * vector[i] for i, value in zip(chosen, solved, strict=True))
            if gain > best_gain:  # the squared error is a constant less the gain
                costs = dict(zip(chosen, solved, strict=True))
                best, best_gain = [costs.get(i, 0.0) for i in range(3)], gain
    return best


def solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solve linear equations by elimination. None if they have no single solution, up to rounding."""
    size = len(vector)
    # Tokens and steps differ by orders of magnitude. A square root has the same bits everywhere; a power has not.
    scales = [sqrt(matrix[i][i]) for i in range(size)]
    if min(scales) == 0.0:
        return None
    rows = [
        [matrix[i][j] / (scales[i] * scales[j]) for j in range(size)] + [vector[i] / scales[i]] for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-9:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = rows[i][size] - fsum(rows[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = rest / rows[i][i]
    return [value / scale for value, scale in zip(solved, scales, strict=True)]
