"""Compare the runs of two engines: figure by figure, and token by token.

The runs alternate: base, extension, base, extension. A *turn* is one run of each, directly after each other, so what
slows the machine for a minute slows both. For each figure there is one ratio per turn, extension ÷ base.

A figure is called better or worse only if a rank test (Mann and Whitney) finds the runs of one side so much better that
fewer than 1 in 100 comparisons of equal engines would give that. With 5 turns, every run of one side must be better
than every run of the other; with more turns, a few may overlap. Otherwise the difference is below the spread of the
runs, and the verdict is "no difference seen". The test assumes no distribution of times, and one slow run cannot make a
difference. It does not know of what is constant in a process, such as the addresses of its memory: measure a small
difference again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from statistics import median

import numpy as np

from nanovllm_extras.bench.report import Options, summarize
from nanovllm_extras.bench.serve_load import ServedLoad

MAX_CHANCE = 0.01  # of calling equal engines different, for each figure
MIN_TURNS = 5  # with fewer, even runs that do not overlap are more likely by chance


@dataclass(frozen=True)
class Figure:
    """A figure of a run."""

    label: str
    more_is_better: bool
    decimals: int
    scale: float = 1.0
    """Multiplies the value when it is shown, for example 100 for percent."""


FIGURES: Mapping[str, Figure] = {
    "output_throughput": Figure("output tokens per second", True, 1),
    "p50_ttft_ms": Figure("TTFT p50, ms", False, 2),
    "p99_ttft_ms": Figure("TTFT p99, ms", False, 2),
    "p50_tpot_ms": Figure("TPOT p50, ms", False, 3),
    "p99_tpot_ms": Figure("TPOT p99, ms", False, 3),
    "request_goodput": Figure("goodput, requests per second", True, 2),
    "good_share": Figure("requests within the limits, %", True, 1, 100),
    "prefix_cache_hit_rate": Figure("prefix cache hit rate, %", True, 1, 100),
    "num_preemptions": Figure("preemptions", False, 0),
    "waste": Figure("waste of the KV cache, %", False, 2, 100),
}
"""Key of JSON -> the figure, in the order of the report."""


@dataclass(frozen=True)
class Comparison:
    """One figure of all turns, of both sides."""

    figure: Figure
    base: list[float]
    extension: list[float]

    @property
    def ratios(self) -> list[float] | None:
        """The ratio extension ÷ base of each turn; None if a base is 0."""
        if not all(self.base):
            return None
        return [new / old for old, new in zip(self.base, self.extension, strict=True)]

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `no difference seen`, `equal` (in every turn), or `too few turns`."""
        if self.base == self.extension:
            return "equal"
        if len(self.base) < MIN_TURNS:
            return "too few turns"
        if chance_of(self.base, self.extension) >= MAX_CHANCE:
            return "no difference seen"
        is_more = count_greater(self.extension, self.base) > count_greater(self.base, self.extension)
        return "better" if is_more == self.figure.more_is_better else "worse"

    def report(self) -> dict[str, object]:
        """Return what is written as JSON."""
        ratios = self.ratios
        return {
            "label": self.figure.label,
            "more_is_better": self.figure.more_is_better,
            "base": self.base,
            "extension": self.extension,
            "base_median": median(self.base),
            "extension_median": median(self.extension),
            "ratios": ratios,
            "ratio_median": None if ratios is None else median(ratios),
            "chance_if_equal": chance_of(self.base, self.extension),
            "verdict": self.verdict,
        }


def figures_of(served: ServedLoad, goodput: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a run. Figures that do not apply, or that the engine does not count, are left out.

    goodput: metric -> limit in milliseconds; empty: no goodput.
    """
    report = summarize(served.results, Options(("ttft", "tpot"), (50, 99), goodput or None))
    counters = served.counters
    values: dict[str, object] = dict(report)
    if goodput:
        values["good_share"] = share(report["request_goodput"], report["request_throughput"])
    if "num_preemptions" in counters:
        values["num_preemptions"] = counters["num_preemptions"]
    if counters.get("prefix_cache_query_tokens"):
        values["prefix_cache_hit_rate"] = counters["prefix_cache_hit_tokens"] / counters["prefix_cache_query_tokens"]
    if counters.get("kv_slots_reserved"):
        values["waste"] = 1 - counters["kv_tokens_stored"] / counters["kv_slots_reserved"]
    if not any(result.tpot is not None for result in served.results):
        values = {name: value for name, value in values.items() if "tpot" not in name}
    return {name: float(str(values[name])) for name in FIGURES if name in values}


def share(part: object, whole: object) -> float:
    return float(str(part)) / float(str(whole)) if whole else 0.0


def compare_figures(
    base: Sequence[Mapping[str, float]], extension: Sequence[Mapping[str, float]]
) -> dict[str, Comparison]:
    """Compare the figures of the turns. Figures that a run does not have are left out."""
    runs = [*base, *extension]
    return {
        name: Comparison(figure, [run[name] for run in base], [run[name] for run in extension])
        for name, figure in FIGURES.items()
        if all(name in run for run in runs)
    }


# ---- the rank test


def chance_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how often two sets of runs are at least this far apart if they come from equal engines (Mann-Whitney).

    Two-sided and exact: all orders of the runs are equally likely. Ties count as half, and are rounded to less far
    apart.
    """
    num = len(one)
    num_ties = num * num - count_greater(one, other) - count_greater(other, one)
    nearest = min(count_greater(one, other), count_greater(other, one)) + num_ties / 2
    # ways[k, s]: in how many ways k of the ranks 0 … 2 num - 1 have the sum s
    ways = np.zeros((num + 1, 2 * num * num))
    ways[0, 0] = 1
    for rank in range(2 * num):
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank]
    lowest = num * (num - 1) // 2  # the sum if all runs of one side are below those of the other
    return min(1.0, 2 * float(ways[num, : lowest + ceil(nearest) + 1].sum() / ways[num].sum()))


def count_greater(one: Sequence[float], other: Sequence[float]) -> int:
    """Count the pairs in which the value of `one` is greater than that of `other`."""
    return sum(a > b for a in one for b in other)


# ---- tokens


@dataclass(frozen=True)
class Difference:
    """The first token in which two answers differ; None if one of them has ended before."""

    turn: int
    request: int
    position: int
    base_token: int | None
    extension_token: int | None


@dataclass(frozen=True)
class TokenComparison:
    """Whether the extension's tokens are those of the base."""

    num_requests: int
    differing: list[int]
    """The requests that differ in at least one turn."""
    first: Difference | None
    """Of the earliest turn with a difference, the request with the lowest index."""
    unsteady: list[int]
    """The requests in which the base differs from its own first turn: some kernels round differently in other batches.
    Then a difference of the extension may have the same cause."""


def compare_tokens(base: Sequence[list[list[int]]], extension: Sequence[list[list[int]]]) -> TokenComparison:
    """Compare the tokens of each turn: for each turn a list of answers, one per request."""
    differing: set[int] = set()
    first: Difference | None = None
    for turn, (old, new) in enumerate(zip(base, extension, strict=True)):
        found = differing_requests(old, new)
        differing.update(found)
        if found and first is None:
            first = first_difference(turn, found[0], old[found[0]], new[found[0]])
    unsteady = {i for old in base[1:] for i in differing_requests(base[0], old)}
    return TokenComparison(len(base[0]), sorted(differing), first, sorted(unsteady))


def differing_requests(one: list[list[int]], other: list[list[int]]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def first_difference(turn: int, request: int, old: list[int], new: list[int]) -> Difference:
    pairs = enumerate(zip_longest(old, new))
    position, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return Difference(turn, request, position, a, b)
