"""Report a load: rates, percentiles, and goodput (requests within all limits).

The keys are those of vLLM's `bench serve`. Times are in milliseconds. Failed requests count only in `failed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nanovllm_extras.bench.results import Result
from nanovllm_extras.machine.printing import say

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


@dataclass(frozen=True)
class Options:
    """The metrics and percentiles of the report. `goodput`: metric -> limit in milliseconds."""

    metrics: tuple[str, ...] = tuple(METRICS)
    percentiles: tuple[float, ...] = (50, 90, 99)
    goodput: Mapping[str, float] | None = None


def summarize(results: list[Result], options: Options) -> dict[str, object]:
    """Return the report of one load. Its duration is from the first sent request to the last received token."""
    done = [result for result in results if result.error is None]
    duration = max((one.end for one in done), default=0.0) - min((one.sent for one in results), default=0.0)
    duration = max(duration, 0.0)
    num_prompt_tokens, num_output_tokens = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)

    def per_second(count: int) -> float:
        return count / duration if duration else 0.0

    report: dict[str, object] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": num_prompt_tokens,
        "total_cached_tokens": sum(r.cached_tokens for r in done),
        "total_output_tokens": num_output_tokens,
        "request_throughput": per_second(len(done)),
        "output_throughput": per_second(num_output_tokens),
        "total_token_throughput": per_second(num_prompt_tokens + num_output_tokens),
        "max_concurrent_requests": max_concurrent(done),
        "max_lag_ms": 1e3 * max((r.lag for r in results), default=0.0),
    }
    if options.goodput:
        report["request_goodput"] = per_second(sum(is_good(r, options.goodput) for r in done))
    for metric in options.metrics:
        report |= describe(metric, milliseconds(metric, done), options.percentiles)
    return report


def milliseconds(metric: str, results: list[Result]) -> list[float]:
    """Return all values of a metric: one for each request, or for `itl` one for each gap between chunks."""
    if metric == "itl":
        return [1e3 * gap for result in results for gap in result.itls]
    values = [getattr(result, metric) for result in results]
    return [1e3 * value for value in values if value is not None]


def describe(metric: str, values: list[float], percentiles: tuple[float, ...]) -> dict[str, object]:
    """Return mean, median, standard deviation and percentiles; zeros if there are no values, as in vLLM."""
    values = values or [0.0]
    named = {f"p{p:g}_{metric}_ms": float(np.percentile(values, p)) for p in percentiles}
    return {
        f"mean_{metric}_ms": float(np.mean(values)),
        f"median_{metric}_ms": float(np.median(values)),
        f"std_{metric}_ms": float(np.std(values)),
        **named,
    }


def is_good(result: Result, limits: Mapping[str, float]) -> bool:
    """Return whether a request is within all limits, in milliseconds.

    For `itl`, the longest gap is compared. An answer with a single token has no TPOT, and is within any limit of it.
    """
    found = {metric: max(milliseconds(metric, [result]), default=0.0) for metric in limits}
    return all(found[metric] <= limit for metric, limit in limits.items())


def max_concurrent(results: list[Result]) -> int:
    """Return the maximum number of requests that were in flight at the same time."""
    changes = sorted([(r.sent, 1) for r in results] + [(r.end, -1) for r in results])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def print_report(report: Mapping[str, object], options: Options) -> None:
    """Print a table of rates, and a table of times."""
    labels = {
        "completed": "requests completed",
        "failed": "requests failed",
        "duration": "seconds",
        "total_input_tokens": "prompt tokens",
        "total_cached_tokens": "  of them found in the prefix cache",
        "total_output_tokens": "output tokens",
        "request_throughput": "requests per second",
        "request_goodput": "  of them within the limits",
        "output_throughput": "output tokens per second",
        "total_token_throughput": "all tokens per second",
        "max_concurrent_requests": "most requests at a time",
        "max_lag_ms": "longest delay before sending, ms",
    }
    for key, label in labels.items():
        if key in report:
            value = report[key]
            say(f"{label:<40} {value:>12,.2f}" if isinstance(value, float) else f"{label:<40} {value:>12,}")
    heads = ["mean", *(f"p{p:g}" for p in options.percentiles)]
    say(f"\n{'milliseconds':<40}" + "".join(f"{head:>12}" for head in heads))
    for metric in options.metrics:
        values = "".join(f"{report[f'{head}_{metric}_ms']:>12,.2f}" for head in heads)
        say(f"{METRICS[metric]:<40}{values}")
