"""Exposition: counts as families of metrics, as Prometheus reads them; for the dashboard and for a worker.

It needs `prometheus_client` (`umbel[metrics]`), so it is imported only where metrics are wanted.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from umbel.events.histogram import Histogram
from umbel.events.meters import Meters

CONTENT_TYPE = CONTENT_TYPE_LATEST
Rows = Iterable[tuple[tuple[str, ...], float]]


def text_of(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def of_tasks(meters: Meters) -> Iterator[Metric]:
    """Copies are made first: another thread may count meanwhile."""
    ended, repeats = list(meters.ended.items()), list(meters.repeats.items())
    yield counter("umbel_tasks", "Tasks that ended, by end.", ("task", "end"), ended)
    retried = [((name,), float(one)) for (name, end), one in ended if end == "retried"]
    yield counter("umbel_task_retries", "Attempts that asked for another.", ("task",), retried)
    again = [((name,), float(one)) for name, one in repeats]
    yield counter("umbel_task_repeats", "Deliveries of an attempt beyond its first.", ("task",), again)
    yield histogram(
        "umbel_task_wait_seconds", "From sending (else receipt) to start.", ("task",), _of(meters.wait)
    )
    yield histogram("umbel_task_run_seconds", "How long tasks ran.", ("task",), _of(meters.run))


def _of(found: Mapping[str, Histogram]) -> list[tuple[tuple[str, ...], Histogram]]:
    return [((task,), one) for task, one in sorted(found.items(), key=itemgetter(0))]


def counter(name: str, said: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    metric = CounterMetricFamily(name, said, labels=labels)
    for values, number in rows:
        metric.add_metric(list(values), number)
    return metric


def gauge(name: str, said: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    metric = GaugeMetricFamily(name, said, labels=labels)
    for values, number in rows:
        metric.add_metric(list(values), number)
    return metric


def histogram(
    name: str, said: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Metric:
    metric = HistogramMetricFamily(name, said, labels=labels)
    for values, one in rows:
        metric.add_metric(list(values), one.cumulative(), one.total_s)
    return metric
