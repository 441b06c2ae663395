"""The Grafana dashboard and the alert rules in contrib/ ask for metrics that the code serves."""

import json
import re
from importlib import import_module
from pathlib import Path
from time import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.web.promql import used_by
from umbel.app.app import App
from umbel.brokers.interface import Depth
from umbel.coordination.driver import instant
from umbel.events.meters import ENDS
from umbel.exposition import text_of
from umbel.protocol.membership.members import Introduced
from umbel.testing.worker import EmbeddedWorker
from umbel.web.dashboard import Dashboard
from umbel.web.exporters import ClusterCollector
from umbel.web.settings import WebSettings
from umbel.wire.control import LeaseRow, OwnStats, PoolStats, Stats
from umbel.wire.event import encode_event
from umbel.worker.remote.view import CLUSTER_LEASES
from umbel.worker.steps.health import Metrics

CONTRIB = Path(__file__).parents[2] / "contrib"
GRAFANA, ALERTS = CONTRIB / "grafana" / "umbel.json", CONTRIB / "prometheus" / "umbel-alerts.yml"
SCRAPED = {"job", "instance"}  # Prometheus puts them on what it reads
FREE = SCRAPED | {"task", "queue", "node", "recorder"}  # their values are the users'
FUNCTIONS = {
    *("absent", "count", "deriv", "histogram_quantile", "increase", "max", "max_over_time"),
    *("min", "rate", "sum", "topk"),
}
VARIABLE = re.compile(r"label_values\((.+), (\w+)\)")
SHOWN_LABEL = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
REMEDY = re.compile(r"\b([Cc]heck|[Ll]ook|[Ss]tart|[Ff]ix|[Aa]dd)\b")
SPAN = re.compile(r"[1-9]\d*[smhd]")
Labels = dict[str, dict[str, set[str]]]  # by metric and label: the values that are served


# ---- what is served --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    home = tmp_path_factory.mktemp("served")
    texts = of_the_dashboard(home), of_a_worker(home)
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    filled = {family.name for family in families if family.samples}
    assert {family.name for family in families} == filled, "labels are known of what has a value"
    found: Labels = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = found.setdefault(sample.name, {})
        for label, value in sample.labels.items():
            labels.setdefault(label, set()).add(value)
    return found


def of_the_dashboard(home: Path) -> str:
    """The collector of `umbel web`, over a cluster of which something is known for each metric."""
    app = App("metered", broker=f"sqlite:///{home / 'queue.db'}")
    site = Dashboard(app, WebSettings(state_file=home / "web.db"))
    model = site.cluster.model
    for number, type_name in enumerate(("sent", "received", "received", "started", *ENDS), start=1):
        model.take(told(f"task-{type_name}", number, uuid="t", name="add", queue="q", runtime=1.0), time())
    model.take(told("worker-elected", 20, eid="e", phase="done", winner="w@h", term=1), time())
    held = [LeaseRow(name, "w@h.1.2", 1, 9.0) for name in CLUSTER_LEASES]
    model.leases.answered(held, time())
    site.feed.queues, site.feed.oldest = {"q": Depth(1, 0, 0)}, {"q": time()}
    site.feed.membership._machine.step(Introduced("w@h", 2, 1, 0, 2.0, "umbel"), instant())
    collector = ClusterCollector(site)
    collector._stats = {"w@h": Stats(PoolStats(processes=[1]), umbel=OwnStats(links={"broker": 1}))}
    collector._log = {"recorder": 1}
    site.journal.close()
    return text_of(collector).decode()


def told(type_name: str, clock: int, **fields: Any) -> bytes:
    envelope = {"type": type_name, "hostname": "w@h", "pid": 1, "clock": clock, "timestamp": time()}
    return encode_event({**envelope, "retries": 0, **fields})


def of_a_worker(home: Path) -> str:
    """What a real worker serves after it has run a task."""
    url = f"sqlite:///{home / 'worker.db'}"
    app = App("metered", broker=url, backend=url, worker_metrics="0")

    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    worker = EmbeddedWorker(app, home)
    worker.start()
    try:
        add.delay(1, 2)
        worker.wait_idle()
        assert worker._worker is not None
        (step,) = (one for one in worker._worker._steps if isinstance(one, Metrics))
        return httpx.get(f"http://127.0.0.1:{step._server.server_port}/metrics", timeout=30).text
    finally:
        worker.stop()
        app.close()


# ---- what is asked for -----------------------------------------------------------------------------


def faults(expression: str, served: Labels) -> list[str]:
    """What the expression names that nobody serves."""
    used = used_by(expression)
    known = {label for one in used.metrics for label in served.get(one, {})} | SCRAPED
    return [
        *(f"no metric {one}" for one in used.metrics - served.keys()),
        *(f"{one} has no label {label}" for one, label in used.matched if label not in _labels(one, served)),
        *(
            f"{one} has no {label}={value}"
            for one, label, value in used.values
            if not _is(one, label, value, served)
        ),
        *(f"no metric here has the label {label}" for label in used.grouped - known),
        *(f"no function {one}" for one in used.functions - FUNCTIONS),
        *(["parentheses"] if expression.count("(") != expression.count(")") else []),
    ]


def _labels(metric: str, served: Labels) -> set[str]:
    return SCRAPED | served.get(metric, {}).keys()


def _is(metric: str, label: str, value: str, served: Labels) -> bool:
    return label in FREE or value in served.get(metric, {}).get(label, set())


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GRAFANA.read_text(encoding="utf-8"))
    return found


def shown_queries() -> list[tuple[str, str]]:
    """(query, legend) of each panel."""
    panels = dashboard()["panels"]
    return [(one["expr"], one["legendFormat"]) for panel in panels for one in panel.get("targets", ())]


def variables() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in dashboard()["templating"]["list"]}


def alerts() -> list[dict[str, Any]]:
    yaml = import_module("yaml")  # it says nothing of its types
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


# ---- the tests -------------------------------------------------------------------------------------


def test_every_query_of_the_dashboard_names_what_is_served(served: Labels) -> None:
    assert {query: found for query, _ in shown_queries() if (found := faults(query, served))} == {}
    for name, one in variables().items():
        if one["type"] == "query":
            asked = VARIABLE.fullmatch(one["query"]["query"])
            assert asked is not None and one["definition"] == asked[0] and not faults(asked[1], served), name
            assert all(asked[2] in _labels(metric, served) for metric in used_by(asked[1]).metrics), name


def test_every_metric_of_ours_is_on_the_dashboard(served: Labels) -> None:
    shown = {one for query, _ in shown_queries() for one in used_by(query).metrics}
    ours = {one for one in served if one.startswith("umbel_") and not one.endswith(("_created", "_count"))}
    histograms = {one.removesuffix("_bucket") + "_sum" for one in shown if one.endswith("_bucket")}
    assert ours - shown - histograms == set()


def test_all_of_flowers_metrics_are_served_with_its_labels(served: Labels) -> None:
    of_tasks, of_nodes = {"worker", "task"}, {"worker"}
    found = {one: set(labels) for one, labels in served.items() if one.startswith("flower_")}
    assert {one: labels for one, labels in found.items() if not one.endswith(("_count", "_sum"))} == {
        "flower_events_total": of_tasks | {"type"},
        "flower_task_runtime_seconds_bucket": of_tasks | {"le"},
        "flower_task_prefetch_time_seconds": of_tasks,
        "flower_worker_prefetched_tasks": of_tasks,
        "flower_worker_online": of_nodes,
        "flower_worker_number_of_currently_executing_tasks": of_nodes,
    }


def test_every_alert_names_what_is_served(served: Labels) -> None:
    assert {one["alert"]: found for one in alerts() if (found := faults(one["expr"], served))} == {}


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(umbel_task_total[5m]))", "no metric umbel_task_total"),
        ("max by (queue) (umbell_queue_ready) > 1", "no metric umbell_queue_ready"),
        ('label_of{__name__=~"umbel_nodes"}', "no metric label_of"),
        ('umbel_nodes and umbel_node{state="lost"}', "no metric umbel_node"),
        ('umbel_nodes{stat="lost"}', "umbel_nodes has no label stat"),
        ('umbel_nodes{state=~"lost|gone"}', "umbel_nodes has no state=gone"),
        ('umbel_tasks_total{end="failure"}', "umbel_tasks_total has no end=failure"),
        ("sum by (tasks) (umbel_tasks_total)", "no metric here has the label tasks"),
        ("rat(umbel_tasks_total[5m])", "no function rat"),
        ("max(umbel_nodes", "parentheses"),
    ],
)
def test_a_misspelt_name_is_noticed(query: str, fault: str, served: Labels) -> None:
    assert fault in faults(query, served)


def test_the_dashboard_can_be_imported() -> None:
    found, known = dashboard(), variables()
    assert found["title"] and found["uid"] and found["schemaVersion"] >= 36
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["gridPos"]["w"] <= 24 for panel in found["panels"])
    assert known["datasource"]["type"] == "datasource" and known["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in found["panels"]:
        if panel["type"] != "row":
            assert panel["title"] and panel["description"] and panel["targets"], panel
            assert all(one["datasource"] == chosen for one in [panel, *panel["targets"]]), panel["title"]
    asked = {name for query, _ in shown_queries() for name in re.findall(r"\$(\w+)", query)}
    assert asked - {"__rate_interval"} <= known.keys()


def test_a_legend_names_labels_that_the_query_keeps() -> None:
    for query, legend in shown_queries():
        assert set(SHOWN_LABEL.findall(legend)) <= used_by(query).grouped, query


@pytest.mark.parametrize("rule", alerts(), ids=lambda one: str(one["alert"]))
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert SPAN.fullmatch(rule["for"]) and rule["labels"]["severity"] in ("info", "warning", "critical")
    said = rule["annotations"]
    assert 10 < len(said["summary"]) < 120
    assert REMEDY.search(said["description"]), "it must say what to do"
    named = set(re.findall(r"\$labels\.(\w+)", said["summary"] + said["description"]))
    assert named <= used_by(rule["expr"]).grouped


def test_each_alert_has_its_own_name() -> None:
    names = [one["alert"] for one in alerts()]
    assert len(names) == len(set(names)) and all(one.startswith("Umbel") for one in names)
