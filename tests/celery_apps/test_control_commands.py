"""The shop under `umbel worker`: its tasks, its own control commands, its log. One worker for all of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery

from tests.celery_apps.programs import SHOP, Home, home
from tests.celery_apps.shop import celeryconfig
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from tests.web.serving import serving
from umbel.celery.configuration import app_for
from umbel.celery.control import revoking_panel
from umbel.control.commands import builtin_panel


class Ran(NamedTuple):
    told: dict[str, Any]
    by_umbel: dict[str, Any]
    log: str
    journal: list[str]
    in_dashboard: list[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    place = tmp_path_factory.mktemp("shop")
    server = RedisServer(place)
    server.start()
    try:
        shop = home(place, SHOP_BROKER=server.url)
        yield used(shop, server.url)
    finally:
        server.stop()


def used(shop: Home, url: str) -> Ran:
    with shop.worker("-n", "till@%h", "-c", "2", "-l", "INFO", "-O", "fair", "-X", "media,audit") as log:
        told = shop.data("tests.celery_apps.shop_client")
        by_umbel = {
            "set_discount": shop.data("umbel", "control", "-A", SHOP, "set_discount", "30", "--json"),
            "limits": shop.data("umbel", "inspect", "-A", SHOP, "limits", "--json"),
            "unknown": shop.run("umbel", "call", "-A", SHOP, f"{SHOP}.mail.sned").stderr,
            "sent": shop.data(
                "umbel", "call", "-A", SHOP, f"{SHOP}.mail.send", "to=eve", "--json", "--wait", "20"
            ),
            "listed": shop.run("umbel", "control", "-A", SHOP).stdout,
            "registered": shop.data("umbel", "inspect", "-A", SHOP, "registered", "--json"),
            "queues": shop.data("umbel", "inspect", "-A", SHOP, "active_queues", "--json"),
            "failed": shop.data("umbel", "task", "failed", "-A", SHOP, "--json"),
        }
        wait_until(lambda: "the report is broken" in log.read_text(), what="the failure in the log")
        in_dashboard = shown_nodes(url, shop.directory)
    return Ran(told, by_umbel, log.read_text(), shop.journal(), in_dashboard)


def shown_nodes(url: str, place: Path) -> list[str]:
    """In a dashboard of the project, when it has found its worker."""
    celery = Celery("shop", broker=url)
    celery.conf.broker_transport_options = celeryconfig.broker_transport_options
    with serving(app_for(celery), place / "web.db") as served:
        wait_until(served.dashboard.cluster.nodes, deadline_s=60.0, what="the worker in the dashboard")
        return [one.node for one in served.dashboard.cluster.nodes()]


def test_its_tasks_end_as_they_do_under_celery(ran: Ran) -> None:
    assert ran.told["outcomes"] == {
        "replaced by a chain": {"number": 7, "items": 1, "queue": "orders", "paid": 5.0, "shipped": True},
        "pydantic": {"number": 3, "total": 5.0},
        "retried": 9,
        "with priority": 4,
        "by a topic": f"{SHOP}.mail.send bob",
        "under a name": 2,
        "raised": "OutOfStock(1)",
        "chord": 12.0,
        "failed": "RuntimeError",
    }


def test_celerys_clients_reach_the_projects_control_commands(ran: Ran) -> None:
    answers = ran.told["answers"]
    node = answers["limits"]["node"]
    assert node.startswith("till@")
    assert answers["limits"] == {"node": node, "app": "shop", "discount": 10}
    assert answers["by its alias"] == answers["limits"]
    assert answers["set_discount"] == {"ok": 25}
    assert answers["afterwards"]["discount"] == 25
    assert "state.consumer" in answers["consumer_queues"]["error"]


def test_a_task_of_the_project_is_sent_from_the_shell(ran: Ran) -> None:
    assert f"did you mean '{SHOP}.mail.send'?" in ran.by_umbel["unknown"]
    assert (ran.by_umbel["sent"]["state"], ran.by_umbel["sent"]["result"]) == (
        "SUCCESS",
        f"{SHOP}.mail.send eve",
    )


def test_inspect_conf_shows_celerys_names_and_no_password(ran: Ran) -> None:
    conf = ran.told["answers"]["conf"]
    assert conf["worker_max_tasks_per_child"] == 400
    assert conf["task_default_queue"] == "default"
    assert f"{SHOP}.orders" in conf["include"]
    assert "celery:5" in ran.told["answers"]["report"]["ok"]


def test_our_commands_reach_them_too(ran: Ran) -> None:
    (obeyed,) = ran.by_umbel["set_discount"]["replies"].values()
    assert obeyed in ({"ok": 30}, 30)
    (limits,) = ran.by_umbel["limits"]["replies"].values()
    assert limits["discount"] == 30
    assert re.search(r"set_discount \[PERCENT\] +Change the highest discount", ran.by_umbel["listed"])


def test_commands_and_dashboard_look_where_its_options_put_the_keys(ran: Ran) -> None:
    """A3: what else of ours asks the broker opens it as the project's workers do."""
    (node,) = ran.in_dashboard
    assert node.startswith("till@")
    assert list(ran.by_umbel["limits"]["replies"]) == [node]


def test_excluded_queues_are_not_consumed(ran: Ran) -> None:
    (queues,) = ran.by_umbel["queues"]["replies"].values()
    assert sorted(queue["name"] for queue in queues) == [
        "default",
        "mail",
        "only.till",
        "orders",
        "priority",
        "refunds",
        "reports",
        "stock",
    ]


def test_main_process_and_children_log_in_the_projects_formats(ran: Ran) -> None:
    assert "SHOP INFO umbel.celery Celery settings that work: accept_content" in ran.log
    assert "SHOP INFO umbel.worker -O has no effect here" in ran.log
    assert f"SHOPTASK INFO {SHOP}.orders.place order 7 placed" in ran.log
    assert "SHOP ERROR celery.redirected mail to bob" in ran.log
    assert re.search(
        rf"SHOP INFO celery.app.trace Task {SHOP}.orders.rush\[\S+\] succeeded in \S+s: 4", ran.log
    )
    assert "worker_state_db (revoked tasks are recorded at the broker" in ran.log


def test_a_task_is_logged_when_it_comes(ran: Ran) -> None:
    came, went = (
        re.search(rf"SHOP INFO {logger} Task {SHOP}.orders.rush\[\S+\] {what}", ran.log)
        for logger, what in (("celery.worker.strategy", "received"), ("celery.app.trace", "succeeded"))
    )
    assert came and went and came.start() < went.start()


def test_a_failed_task_is_logged_once(ran: Ran) -> None:
    assert ran.log.count("RuntimeError('the report is broken')") == 1
    assert ran.log.count("RuntimeError: the report is broken") == 1


def test_signals_of_logging_are_sent_in_main_process_and_children(ran: Ran) -> None:
    assert ran.journal.count("after_setup_logger") == 3
    assert ran.journal.count("after_setup_task_logger") == 3
    assert ran.journal.count("process_init") == 2


@pytest.mark.parametrize("name", ["prerun", "failure"])
def test_signals_of_tasks_are_sent(ran: Ran, name: str) -> None:
    assert any(line.startswith(name) for line in ran.journal)


def test_a_worker_is_configured_by_its_name_before_it_starts(ran: Ran) -> None:
    """The queue that it adds is among those consumed above."""
    (configured,) = [line for line in ran.journal if line.startswith("init ")]
    assert configured.startswith("init till@")
    (rules,) = ran.by_umbel["registered"]["replies"].values()
    assert f"{SHOP}.orders.rush [rate_limit=2000/s]" in rules


def test_what_failed_can_be_retried(ran: Ran) -> None:
    """Acknowledged early, as Celery does by default, and kept all the same."""
    assert "OutOfStock(1)" in {row["reason"] for row in ran.by_umbel["failed"]}


def test_revoke_and_terminate_are_replaced_by_commands_that_store_the_revoke() -> None:
    plain = {command.name: command.handler for command in builtin_panel()}
    replaced = {command.name: command.handler for command in revoking_panel()}
    assert replaced.keys() == {"revoke", "terminate"}
    assert all(replaced[name] is not plain[name] for name in replaced)
