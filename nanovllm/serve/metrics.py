"""What Prometheus reads at `/metrics`: vLLM's names and meanings, with the prefix `nanovllm:`.

Gauges and counters of the engine are read when they are asked for, and cost the requests nothing. Histograms take a
request's times when it ends. https://docs.vllm.ai/en/latest/design/metrics.html
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.outputs import EngineStats, RequestOutput

StatsReader = Callable[[], EngineStats]

# upper bounds of the buckets: seconds, or tokens
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", TTFT),
    "inter_token_latency_seconds": ("Between two tokens of a request.", ITL),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, of each request.", ITL),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", LATENCY),
    "request_queue_time_seconds": ("From a request's arrival to the first step that computes it.", LATENCY),
    "request_prefill_time_seconds": ("From the first step that computes a request to its first token.", LATENCY),
    "request_decode_time_seconds": ("From a request's first token to its last.", LATENCY),
    "request_prompt_tokens": ("Tokens of each prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of each request's output.", TOKENS),
}


class Metrics:
    """One for each server; nothing is global."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._histograms = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            histogram = Histogram(f"nanovllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
            self._histograms[name] = histogram.labels(model_name)
        self._finished = Counter(
            "nanovllm:request_success",
            "Requests that have ended, by the reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort"):
            self._finished.labels(model_name, reason)

    def watch(self, get_stats: StatsReader) -> None:
        """Show the counts and gauges of an engine, too."""
        self._registry.register(EngineCollector(self._model_name, get_stats))

    def note_end(self, output: RequestOutput, arrival_time: float, reason: str) -> None:
        """A request has ended, or its client has gone. `arrival_time` is of `time.monotonic()`."""
        times, observe = output.metrics, self._observe
        self._finished.labels(self._model_name, reason).inc()
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        observe("request_generation_tokens", sum(len(completion.token_ids) for completion in output.outputs))
        first, last = times.first_token_time, times.finished_time
        if times.scheduled_time is not None:
            observe("request_queue_time_seconds", times.scheduled_time - arrival_time)
        if first is None:
            return
        observe("time_to_first_token_seconds", first - arrival_time)
        observe("request_prefill_time_seconds", first - (times.scheduled_time or arrival_time))
        for seconds in times.inter_token_latencies:
            observe("inter_token_latency_seconds", seconds)
        if last is not None:
            observe("e2e_request_latency_seconds", last - arrival_time)
            observe("request_decode_time_seconds", last - first)
        if times.tpot is not None:
            observe("request_time_per_output_token_seconds", times.tpot)

    def as_text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class EngineCollector(Collector):
    """Reads the engine's statistics when Prometheus asks."""

    def __init__(self, model_name: str, get_stats: StatsReader) -> None:
        self._model_name = model_name
        self._get_stats = get_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._get_stats()
        used = 1 - stats.num_free_blocks / stats.num_kv_blocks
        yield self._gauge("num_requests_running", "Sequences that are being computed.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait to be computed.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use, from 0 to 1.", used)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens that were looked up.", stats.prefix_cache_query_tokens),
            ("prefix_cache_hits", "Prompt tokens that were found.", stats.prefix_cache_hit_tokens),
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prompt_tokens", "Tokens of all prompts.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ):
            counter = CounterMetricFamily(f"nanovllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"nanovllm:{name}", text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge
