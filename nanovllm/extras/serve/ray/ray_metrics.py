"""Combine the metrics of several replicas to one text, in which each sample has its replica as a label."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge_texts(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the combined metrics in Prometheus' text format. texts: each replica's name and metrics."""
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                merged.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(Gathered(families.values()))
    return generate_latest(registry)


class Gathered(Collector):
    """A collector that returns metric families which have already been collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
