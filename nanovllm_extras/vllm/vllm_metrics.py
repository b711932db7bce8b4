"""Convert the engine's statistics to vLLM's counters, gauges and histograms, with the prefix `nanovllm:`.

`observations.py` counts from the first request on. This file converts the counts when `llm.get_metrics()` or a server's
`/metrics` requests them.
https://prometheus.io/docs/concepts/metric_types/, https://docs.vllm.ai/en/latest/design/metrics.html
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from nanovllm_extras.engine.engine_stats import EngineStats
from nanovllm_extras.engine.llm_methods import HasStats
from nanovllm_extras.engine.observations import LADDER, Observations

# upper bounds of the buckets, in seconds or tokens. They have at most two digits, because they must be in `LADDER`
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

BOUNDS: Mapping[str, tuple[float, ...]] = {
    "ttft": TTFT,
    "inter_token_latencies": ITL,
    "tpot": ITL,
    "e2e_latency": LATENCY,
    "queue_time": LATENCY,
    "prefill_time": LATENCY,
    "decode_time": LATENCY,
    "num_prompt_tokens": TOKENS,
    "num_output_tokens": TOKENS,
    "max_output_tokens": TOKENS,
}
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
    "request_max_num_generation_tokens": ("max_output_tokens", "Tokens of the longest sample of each request."),
}
"""vLLM's name -> the name of the observation, and its description."""
GAUGES: Mapping[str, str] = {
    "num_requests_running": "Sequences that are being computed.",
    "num_requests_waiting": "Requests that wait to be computed.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use, from 0 to 1.",
    "state_slots": "Slots of recurrent states, by use: running, snapshot or free.",
    "state_slot_bytes": "Size of a slot, in all layers with recurrent states.",
}
COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Tokens of all prompts.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Preemptions.",
    "spec_decode_num_drafts": "Drafts that were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "recording_failures": "Recordings and other observers that have failed and are no longer called.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "prefix_cache_misses": "Prompt tokens that were not found in the prefix cache, by cause.",
    "external_prefix_cache_hits": "Tokens whose K and V were loaded from the K/V store.",
    "kv_store_loaded_states": "Snapshots of recurrent states that were loaded from the K/V store.",
    "kv_store_failed_loads": "Blocks that the K/V store had when it was asked, and could not load.",
    "kv_store_dropped_blocks": "Blocks that were not saved to the K/V store, because too many waited.",
    "kv_store_hits": "Blocks that a tier of the K/V store had when it was asked.",
    "kv_store_misses": "Blocks that a tier of the K/V store was asked for and did not have.",
    "kv_store_loaded_bytes": "Bytes loaded from a tier of the K/V store.",
    "kv_store_saved_bytes": "Bytes saved to a tier of the K/V store.",
    "kv_store_load_time_seconds": "Time spent in loading from a tier of the K/V store.",
    "kv_store_save_time_seconds": "Time spent in saving to a tier of the K/V store.",
    "kv_store_evictions": "Blocks that a tier of the K/V store has evicted.",
    "kv_store_failures": "Calls of a tier of the K/V store that have raised, and blocks found damaged.",
    "request_success": "Requests that have ended, by finish reason.",
}

TIER_FIELDS = (
    *("hits", "misses", "loaded_bytes", "saved_bytes", "load_time_s", "save_time_s"),
    *("evictions", "failures"),
)
"""Counters of each tier of a K/V store: fields of `TierStats`."""


@dataclass
class Metric:
    """A metric with its labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A value that only grows."""

    value: float = 0


@dataclass
class Gauge(Metric):
    """A value that can grow and shrink."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """The distribution of values: their number and sum, and their number up to each bound."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)
    """Upper bound -> number of values up to this bound. The last bound is `+Inf`."""


def request_metrics(observed: Observations) -> list[Metric]:
    """Return the metrics of the requests that have ended."""
    ended = observed.num_ended.items()
    counters = [Counter("nanovllm:request_success", {"finished_reason": reason}, count) for reason, count in ended]
    return [*counters, *(make_histogram(name, observed, source) for name, (source, _) in HISTOGRAMS.items())]


def make_histogram(name: str, observed: Observations, source: str) -> Histogram:
    """Return the histogram of the observations of `source`. A bucket includes the values of all lower buckets."""
    up_to = list(accumulate(observed.counts[source]))  # [len(LADDER) + 1]
    buckets = {str(float(bound)): up_to[bisect_left(LADDER, bound)] for bound in BOUNDS[source]} | {"+Inf": up_to[-1]}
    return Histogram(f"nanovllm:{name}", {}, up_to[-1], observed.sums[source], buckets)


def make_metrics(stats: EngineStats, observed: Observations) -> list[Metric]:
    """Return all metrics of an engine."""
    values: dict[str, float] = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": 1 - stats.num_free_blocks / stats.num_kv_blocks,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "num_preemptions": stats.num_preemptions,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "recording_failures": stats.num_failed_observers,
        "prefix_cache_queries": stats.prefix_cache_query_tokens,
        "prefix_cache_hits": stats.prefix_cache_hit_tokens,
    }
    metrics: list[Metric] = [
        Gauge(f"nanovllm:{name}", {}, float(value)) if name in GAUGES else Counter(f"nanovllm:{name}", {}, int(value))
        for name, value in values.items()
    ]
    misses = stats.prefix_cache_miss_tokens.items()
    metrics += [Counter("nanovllm:prefix_cache_misses", {"cause": cause}, count) for cause, count in misses]
    return metrics + state_metrics(stats) + store_metrics(stats) + request_metrics(observed)


def state_metrics(stats: EngineStats) -> list[Metric]:
    """Return the gauges of recurrent states; none if the model has no such states."""
    states = stats.states
    if states is None:
        return []
    uses = {"running": states.num_running, "snapshot": states.num_snapshots}
    uses["free"] = states.num_slots - sum(uses.values())
    slots: list[Metric] = [Gauge("nanovllm:state_slots", {"use": use}, float(count)) for use, count in uses.items()]
    return [*slots, Gauge("nanovllm:state_slot_bytes", {}, float(states.bytes_per_slot))]


def store_metrics(stats: EngineStats) -> list[Metric]:
    """Return the metrics of the K/V store, one of each kind for each tier; none if the engine has no store."""
    store = stats.kv_store
    if store is None:
        return []
    metrics: list[Metric] = [
        Counter("nanovllm:external_prefix_cache_hits", {}, store.loaded_tokens),
        Counter("nanovllm:kv_store_loaded_states", {}, store.num_loaded_states),
        Counter("nanovllm:kv_store_failed_loads", {}, store.num_failed_loads),
        Counter("nanovllm:kv_store_dropped_blocks", {}, store.num_dropped_blocks),
    ]
    for counter in TIER_FIELDS:
        name = f"nanovllm:kv_store_{counter.replace('_time_s', '_time_seconds')}"
        metrics += [Counter(name, {"tier": tier}, getattr(one, counter)) for tier, one in store.tiers.items()]
    return metrics


def get_metrics(self: HasStats) -> list[Metric]:
    """Return counters, gauges and histograms, with vLLM's names and the prefix `nanovllm:`. A method of `LLM`."""
    return make_metrics(self.engine.get_stats(), self.engine.observed)
