"""Combine the metrics of several replicas to one text, whose samples have the deployment and the replica as labels."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merge_texts(texts: Iterable[tuple[Mapping[str, str], bytes]]) -> bytes:
    """Return the combined metrics in Prometheus' text format. texts: the labels and the metrics of each replica."""
    families: dict[str, Metric] = {}
    for added, text in texts:
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, **added}
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
