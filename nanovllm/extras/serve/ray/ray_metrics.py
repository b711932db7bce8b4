"""`/metrics` of several replicas as one text, in which each sample says its replica."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge_texts(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """texts: a replica's name and its metrics, each in Prometheus' text format."""
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
    """Families that are known already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
