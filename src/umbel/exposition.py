"""Prometheus metrics of the dashboard and of workers.

This module needs `prometheus_client` (`umbel[metrics]`), so it is imported only where metrics are served.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from umbel.events.meters import Histogram, Meters

CONTENT_TYPE = CONTENT_TYPE_LATEST
Rows = Iterable[tuple[tuple[str, ...], float]]


def text_of(collector: Collector) -> bytes:
    """Return the metrics of a collector in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def of_tasks(meters: Meters) -> Iterator[Metric]:
    """Yield the metrics of tasks. The counts are copied first, because another thread may update them."""
    ended, repeats = list(meters.ended.items()), list(meters.repeats.items())
    yield counter("umbel_tasks", "Tasks that ended, by end.", ("task", "end"), ended)
    retried = [((name,), float(number)) for (name, end), number in ended if end == "retried"]
    yield counter("umbel_task_retries", "Attempts that asked for another.", ("task",), retried)
    again = [((name,), float(number)) for name, number in repeats]
    yield counter("umbel_task_repeats", "Deliveries of an attempt beyond its first.", ("task",), again)
    wait, run = _by_task(meters.wait), _by_task(meters.run)
    yield histogram("umbel_task_wait_seconds", "From sending (else receipt) to start.", ("task",), wait)
    yield histogram("umbel_task_run_seconds", "How long tasks ran.", ("task",), run)


def _by_task(histograms: Mapping[str, Histogram]) -> list[tuple[tuple[str, ...], Histogram]]:
    return [((task,), found) for task, found in sorted(histograms.items(), key=itemgetter(0))]


def counter(name: str, help_text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    """Return a counter with one value per row of labels."""
    return _filled(CounterMetricFamily(name, help_text, labels=labels), rows)


def gauge(name: str, help_text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    """Return a gauge with one value per row of labels."""
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), rows)


def histogram(
    name: str, help_text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Metric:
    """Return a histogram per row of labels."""
    metric = HistogramMetricFamily(name, help_text, labels=labels)
    for values, found in rows:
        metric.add_metric(list(values), found.cumulative(), found.total_s)
    return metric


def _filled(metric: Any, rows: Rows) -> Metric:
    for values, number in rows:
        metric.add_metric(list(values), number)
    filled: Metric = metric
    return filled
