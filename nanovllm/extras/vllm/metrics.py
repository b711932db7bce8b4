"""What the engine counts and observes, as vLLM's counters, gauges and histograms; names have the prefix `nanovllm:`.

`engine/stats.py` counts from the first request; this file gives the counts their names and forms when they are asked
for, by `llm.get_metrics()` or a server's `/metrics`.
https://prometheus.io/docs/concepts/metric_types/, https://docs.vllm.ai/en/latest/design/metrics.html
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from nanovllm.engine.stats import BOUNDS, Observations
from nanovllm.outputs import EngineStats

HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "time_to_first_token_seconds": ("ttft", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token_latencies", "Between two tokens of a request."),
    "request_time_per_output_token_seconds": ("tpot", "Mean time per token after the first, of each request."),
    "e2e_request_latency_seconds": ("e2e_latency", "From a request's arrival to its end."),
    "request_queue_time_seconds": ("queue_time", "From a request's arrival to the first step that computes it."),
    "request_prefill_time_seconds": (
        "prefill_time",
        "From the first step that computes a request to its first result.",
    ),
    "request_decode_time_seconds": ("decode_time", "From a request's first token to its last."),
    "request_prompt_tokens": ("num_prompt_tokens", "Tokens of each prompt."),
    "request_generation_tokens": ("num_output_tokens", "Tokens of each request's output."),
}
"""vLLM's name -> the name of the observation, and what it means."""
GAUGES: Mapping[str, str] = {
    "num_requests_running": "Sequences that are being computed.",
    "num_requests_waiting": "Requests that wait to be computed.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use, from 0 to 1.",
}
COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Tokens of all prompts.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Preemptions.",
    "recording_failures": "Recordings and other observers that have failed, and see nothing any more.",
    "prefix_cache_queries": "Prompt tokens that were looked up.",
    "prefix_cache_hits": "Prompt tokens that were found.",
    "request_success": "Requests that have ended, by the reason.",
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
    """Counts of values, by size."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)
    """Upper bound -> number of values up to it; the last bound is `+Inf`."""


def request_metrics(observed: Observations) -> list[Metric]:
    """Of the requests that have ended."""
    ended = observed.num_ended.items()
    counters = [Counter("nanovllm:request_success", {"finished_reason": reason}, count) for reason, count in ended]
    return [*counters, *(make_histogram(name, observed, source) for name, (source, _) in HISTOGRAMS.items())]


def make_histogram(name: str, observed: Observations, source: str) -> Histogram:
    """The observations of `source`; each bucket also counts the values of all buckets below it."""
    bounds = [*(str(float(bound)) for bound in BOUNDS[source]), "+Inf"]
    buckets = dict(zip(bounds, accumulate(observed.counts[source]), strict=True))
    return Histogram(f"nanovllm:{name}", {}, buckets["+Inf"], observed.sums[source], buckets)


def make_metrics(stats: EngineStats, observed: Observations) -> list[Metric]:
    """All metrics of an engine."""
    values: dict[str, float] = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": 1 - stats.num_free_blocks / stats.num_kv_blocks,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "num_preemptions": stats.num_preemptions,
        "recording_failures": stats.num_failed_observers,
        "prefix_cache_queries": stats.prefix_cache_query_tokens,
        "prefix_cache_hits": stats.prefix_cache_hit_tokens,
    }
    metrics: list[Metric] = [
        Gauge(f"nanovllm:{name}", {}, float(value)) if name in GAUGES else Counter(f"nanovllm:{name}", {}, int(value))
        for name, value in values.items()
    ]
    return metrics + request_metrics(observed)
