"""What is counted and observed, as counters, gauges and histograms: for `llm.get_metrics()` and a server's `/metrics`.

Names and meanings are those of vLLM, with the prefix `nanovllm:`. A request's times are observed when it has ended.
https://prometheus.io/docs/concepts/metric_types/, https://docs.vllm.ai/en/latest/design/metrics.html
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from nanovllm.outputs import EngineStats, RequestMetrics

# upper bounds of the buckets: seconds, or tokens
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", TTFT),
    "inter_token_latency_seconds": ("Between two tokens of a request.", ITL),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, of each request.", ITL),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LATENCY),
    "request_queue_time_seconds": ("From a request's arrival to the first step that computes it.", LATENCY),
    "request_prefill_time_seconds": ("From the first step that computes a request to its first result.", LATENCY),
    "request_decode_time_seconds": ("From a request's first token to its last.", LATENCY),
    "request_prompt_tokens": ("Tokens of each prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of each request's output.", TOKENS),
}
GAUGES: Mapping[str, str] = {
    "num_requests_running": "Sequences that are being computed.",
    "num_requests_waiting": "Requests that wait to be computed.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use, from 0 to 1.",
}
COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Tokens of all prompts.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Preemptions.",
    "prefix_cache_queries": "Prompt tokens that were looked up.",
    "prefix_cache_hits": "Prompt tokens that were found.",
    "request_success": "Requests that have ended, by the reason.",
}
REASONS = ("stop", "length", "abort")


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
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = dict(zip(names, accumulate(self._counts), strict=True))
        return Histogram(f"nanovllm:{name}", {}, buckets["+Inf"], self._sum, buckets)


class RequestObservations:
    """What is observed of each request when it ends."""

    def __init__(self) -> None:
        self._observed = {name: Observations(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._ended = dict.fromkeys(REASONS, 0)

    def observe(self, times: RequestMetrics, num_prompt_tokens: int, num_output_tokens: int, reason: str) -> None:
        """`num_output_tokens` are those of all samples; the request for an embedding has none."""
        self._ended[reason] += 1
        values = {
            "request_prompt_tokens": num_prompt_tokens,
            "request_generation_tokens": num_output_tokens,
            "request_queue_time_seconds": times.queue_time,
            "request_prefill_time_seconds": times.prefill_time,
            "e2e_request_latency_seconds": times.e2e_latency,
        }
        if num_output_tokens:
            values["time_to_first_token_seconds"] = times.ttft
            values["request_decode_time_seconds"] = times.decode_time
            values["request_time_per_output_token_seconds"] = times.tpot
            for seconds in times.inter_token_latencies:
                self._observed["inter_token_latency_seconds"].add(seconds)
        for name, value in values.items():
            if value is not None:
                self._observed[name].add(value)

    def note_abort(self) -> None:
        """A request has gone before anything was known of it."""
        self._ended["abort"] += 1

    def as_metrics(self) -> list[Metric]:
        ended = [Counter("nanovllm:request_success", {"finished_reason": one}, n) for one, n in self._ended.items()]
        return [*ended, *(observed.as_histogram(name) for name, observed in self._observed.items())]


def make_metrics(stats: EngineStats, observed: RequestObservations) -> list[Metric]:
    """All metrics of an engine."""
    values: dict[str, float] = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": 1 - stats.num_free_blocks / stats.num_kv_blocks,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": stats.prefix_cache_query_tokens,
        "prefix_cache_hits": stats.prefix_cache_hit_tokens,
    }
    metrics: list[Metric] = [
        Gauge(f"nanovllm:{name}", {}, float(value)) if name in GAUGES else Counter(f"nanovllm:{name}", {}, int(value))
        for name, value in values.items()
    ]
    return metrics + observed.as_metrics()
