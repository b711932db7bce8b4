"""Provide the metrics at `/metrics`: the metrics of `nanovllm_extras/vllm/vllm_metrics.py`, in Prometheus' text format.

The engine's statistics are read only when `/metrics` is requested, so requests do not pay for them. The server observes
requests itself: it measures from the arrival at the server, and counts requests whose clients have disconnected.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from nanovllm_extras.engine.engine_stats import EngineStats
from nanovllm_extras.engine.observations import Observations
from nanovllm_extras.requests.lazy_outputs import RequestMetrics
from nanovllm_extras.serve.http_metrics import HTTPCounts
from nanovllm_extras.vllm.vllm_metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Counter,
    Gauge,
    Histogram,
    Metric,
    make_metrics,
    request_metrics,
)


class Metrics(Collector):
    """The metrics of one server, with their own registry."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.observed = Observations()
        self.http = HTTPCounts()
        self._get_stats: Callable[[], EngineStats] | None = None
        self._info: dict[str, str] = {}
        self._others: list[Callable[[], Iterable[Family]]] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, processor time and open files, as `process_…`

    def watch(self, get_stats: Callable[[], EngineStats], info: Mapping[str, str]) -> None:
        """Include the counters and gauges of an engine. info: labels that describe the engine."""
        self._get_stats, self._info = get_stats, dict(info)

    def include(self, families: Callable[[], Iterable[Family]]) -> None:
        """Include the metrics that `families` yields."""
        self._others.append(families)

    def note_end(
        self,
        times: RequestMetrics,
        arrival_time: float,
        num_prompt_tokens: int,
        lengths: list[int],
        reason: str,
    ) -> None:
        """Observe a request that has ended, or whose client has disconnected.

        arrival_time: when the server received the request, in `time.monotonic()`.
        lengths: the numbers of tokens of its samples.
        """
        self.observed.observe(replace(times, arrival_time=arrival_time), num_prompt_tokens, lengths, reason)

    def note_abort(self) -> None:
        """Count a request whose client has disconnected before the first output."""
        self.observed.num_ended["abort"] += 1

    def as_text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Yield all metric families. Prometheus' library calls this."""
        observed = self.observed
        metrics = request_metrics(observed) if self._get_stats is None else make_metrics(self._get_stats(), observed)
        for name, same in groupby(metrics, key=lambda metric: metric.name):
            yield self._family(name, list(same))
        if self._info:
            labels = {"model_name": self._model_name, **self._info}
            yield InfoMetricFamily("nanovllm:engine", "What computes.", value=labels)
        yield from self.http.families()
        for families in self._others:
            yield from families()

    def _family(self, name: str, metrics: list[Metric]) -> Family:
        """Return the family of metrics that have the same name and differ only in their labels."""
        short, labels = name.removeprefix("nanovllm:"), ["model_name", *metrics[0].labels]
        family: Any
        if isinstance(metrics[0], Gauge):
            family = GaugeMetricFamily(name, GAUGES[short], labels=labels)
        elif isinstance(metrics[0], Counter):
            family = CounterMetricFamily(name, COUNTERS[short], labels=labels)
        else:
            family = HistogramMetricFamily(name, HISTOGRAMS[short][1], labels=labels)
        for metric in metrics:
            values = [self._model_name, *metric.labels.values()]
            if isinstance(metric, Histogram):
                family.add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Counter | Gauge):
                family.add_metric(values, metric.value)
        return family
