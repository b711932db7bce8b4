"""Statistics in Prometheus' forms, as `llm.get_metrics()` returns them: counters, gauges, histograms.

Names and meanings are those of vLLM, with the prefix `nanovllm:`. A request's times are observed when it has ended.
https://prometheus.io/docs/concepts/metric_types/
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from nanovllm.engine.request import Request
from nanovllm.outputs import EngineStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
BOUNDS = {  # upper bounds of the buckets of each histogram
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}


@dataclass
class Metric:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """It only grows."""

    value: int = 0


@dataclass
class Gauge(Metric):
    """It goes up and down."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """How many values were at most so large."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)
    """Upper bound -> number of values up to it; the last bound is `+Inf`."""


class Observations:
    """Values of one histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def as_histogram(self, name: str) -> Histogram:
        buckets, total = {}, 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(f"nanovllm:{name}", {}, total, self._sum, buckets)


class RequestObservations:
    """What is observed of each request when it ends."""

    def __init__(self) -> None:
        self._observed = {name: Observations(bounds) for name, bounds in BOUNDS.items()}

    def observe(self, request: Request) -> None:
        times, arrival = request.token_times, request.arrival_time
        self._observed["request_prompt_tokens"].add(len(request.prompt_token_ids))
        self._observed["request_generation_tokens"].add(sum([seq.num_output_tokens for seq in request.seqs]))
        if request.scheduled_time is not None:
            self._observed["request_queue_time_seconds"].add(request.scheduled_time - arrival)
        if times:
            self._observed["time_to_first_token_seconds"].add(times[0] - arrival)
            self._observed["e2e_request_latency_seconds"].add(times[-1] - arrival)
        for earlier, later in zip(times, times[1:], strict=False):
            self._observed["inter_token_latency_seconds"].add(later - earlier)

    def as_histograms(self) -> list[Metric]:
        return [observed.as_histogram(name) for name, observed in self._observed.items()]


def make_metrics(stats: EngineStats, observed: RequestObservations) -> list[Metric]:
    """All metrics of an engine."""
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": 1 - stats.num_free_blocks / stats.num_kv_blocks,
    }
    counters = {
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "request_success": stats.num_finished,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": stats.prefix_cache_query_tokens,
        "prefix_cache_hits": stats.prefix_cache_hit_tokens,
    }
    metrics: list[Metric] = [Gauge(f"nanovllm:{name}", {}, float(value)) for name, value in gauges.items()]
    metrics += [Counter(f"nanovllm:{name}", {}, value) for name, value in counters.items()]
    return metrics + observed.as_histograms()
