"""`umbel celery check` is right about each thing that a project of some size uses, and refuses by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.celery_apps.programs import SHOP, Home, home

RIGHT: dict[tuple[str, str], str] = {  # (group, name): verdict
    ("settings", "accept_content"): "works",
    ("settings", "timezone"): "differs",
    ("settings", "imports"): "works",
    ("settings", "beat_schedule"): "works",
    ("settings", "task_annotations"): "works",
    ("settings", "task_default_queue"): "works",
    ("settings", "task_default_rate_limit"): "works",
    ("settings", "task_queues"): "works",
    ("settings", "task_routes"): "works",
    ("settings", "task_soft_time_limit"): "works",
    ("settings", "task_time_limit"): "works",
    ("settings", "task_track_started"): "works",
    ("settings", "worker_log_format"): "works",
    ("settings", "worker_task_log_format"): "works",
    ("settings", "worker_max_memory_per_child"): "works",
    ("settings", "worker_max_tasks_per_child"): "works",
    ("settings", "worker_prefetch_multiplier"): "differs",
    ("settings", "worker_redirect_stdouts_level"): "works",
    ("settings", "worker_send_task_events"): "works",
    ("settings", "worker_state_db"): "no effect",
    ("settings", "broker_url"): "works",
    ("settings", "broker_transport_options"): "works",
    ("settings", "broker_connection_retry_on_startup"): "differs",
    ("settings", "result_backend"): "works",
    ("settings", "result_backend_transport_options"): "works",
    ("settings", "result_expires"): "works",
    ("settings", "result_extended"): "works",
    ("broker transport options", "visibility_timeout"): "no effect",
    ("broker transport options", "queue_order_strategy"): "no effect",
    ("broker transport options", "global_keyprefix"): "works",
    ("result backend options", "global_keyprefix"): "works",
    **{
        ("queues", name): "works"
        for name in ["audit", "default", "mail", "media", "orders", "priority", "refunds", "reports", "stock"]
    },
    **{
        ("tasks", name): "works"
        for name in [
            "acks_late",
            "acks_on_failure",
            "acks_on_failure_or_timeout",
            "acks_on_timeout",
            "autoretry_for",
            "bind",
            "default_retry_delay",
            "expires",
            "ignore_result",
            "max_retries",
            "priority",
            "pydantic",
            "queue",
            "rate_limit",
            "reject_on_worker_lost",
            "soft_time_limit",
            "store_errors_even_if_ignored",
            "throws",
            "time_limit",
            "typing",
        ]
    },
    ("tasks", f"base class {SHOP}.bases.Audited"): "works",
    ("tasks", f"base class {SHOP}.bases.WithCart"): "works",
    **{
        ("signals", name): "works"
        for name in [
            "celeryd_after_setup",
            "celeryd_init",
            "task_prerun",
            "task_failure",
            "worker_process_init",
            "worker_ready",
            "after_setup_logger",
            "after_setup_task_logger",
        ]
    },
    ("schedule", "nightly-report"): "works",
    ("schedule", "restock"): "works",
    ("schedule", "heartbeat"): "works",
    ("schedule", "forgotten"): "differs",
    ("control commands", "limits"): "works",
    ("control commands", "set_discount"): "works",
    ("control commands", "consumer_queues"): "works",
}
ODD: dict[tuple[str, str], bool] = {  # (group, name): whether a worker refuses to start
    ("settings", "worker_consumer"): True,
    ("settings", "worker_direct"): True,
    ("settings", "worker_pool"): True,
    ("settings", "control_exchange"): False,
    ("broker transport options", "credential_provider"): True,
    ("queues", "news"): True,
    ("tasks", "Request"): True,
    ("signals", "beat_init"): False,
    ("classes", "loader"): True,
    ("classes", "user_options['worker']"): False,
    ("bootsteps", f"{SHOP}.oddities.Liveness"): True,
    ("bootsteps", f"{SHOP}.oddities.PriceFeed"): True,
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def told(shop: Home) -> dict[str, Any]:
    found: dict[str, Any] = shop.data("umbel", "celery", "check", "-A", SHOP, "--json")
    return found


def by_name(told: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["group"], one["name"]): one for one in told["findings"]}


def test_each_thing_that_the_project_uses_has_its_verdict_and_nothing_else(told: dict[str, Any]) -> None:
    found = by_name(told)
    assert {key: one["verdict"] for key, one in found.items()} == RIGHT
    assert told["supported"] is True


def test_the_values_are_shown_and_no_password_is(told: dict[str, Any]) -> None:
    found = by_name(told)
    assert found["settings", "broker_url"]["value"] == "redis://:***@localhost:6379/0"
    assert "secret" not in str(told)
    assert found["queues", "mail"]["value"] == "topic events ← mail.#"
    assert "x-max-priority=10" in found["queues", "priority"]["value"]
    assert found["tasks", "rate_limit"]["value"] == f"{SHOP}.orders.refund, {SHOP}.orders.refund_all"
    assert "no task is named" in found["schedule", "forgotten"]["note"]


def test_it_recommends_what_a_crash_would_show(told: dict[str, Any]) -> None:
    early, lost = told["recommendations"]
    assert early.startswith("39 of 50 tasks are acknowledged before they run")
    assert lost.startswith("9 tasks are acknowledged late, but fail when their process dies")


def test_what_is_not_supported_is_named_and_the_worker_refuses_it(shop: Home) -> None:
    odd = {"SHOP_ODDITIES": "1", "SHOP_NEWS": "1", "SHOP_LOADER": f"{SHOP}.loaders:Loader"}
    checked = shop.run("umbel", "celery", "check", "-A", SHOP, "--json", **odd)
    assert checked.returncode == 1
    found = by_name(shop_data(checked.stdout))
    assert {key: one["refused"] for key, one in found.items() if one["verdict"] == "not supported"} == ODD
    started = shop.run("umbel", "worker", "-A", SHOP, "-l", "error", **odd)
    assert started.returncode == 2
    refusal = started.stderr.splitlines()[-1]
    assert refusal.startswith("umbel: cannot run this Celery project.")
    for (_, name), is_refused in ODD.items():
        assert (f"{name}:" in refusal) is is_refused, name


def test_what_the_command_line_replaces_is_not_refused(shop: Home) -> None:
    """The broker does not answer: a refusal would come before anybody asks it."""
    odd = {"SHOP_NEWS": "1", "SHOP_POOL": "eventlet", "SHOP_BROKER": "redis://127.0.0.1:1/0"}
    asked = ("umbel", "worker", "-A", SHOP, "-l", "warn", "--purge")
    refused = shop.run(*asked, **odd).stderr
    assert "worker_pool: eventlet" in refused and "queues: news" in refused
    replaced = shop.run(*asked, "-P", "threads", "-X", "news", **odd).stderr
    assert "cannot run this Celery project" not in replaced
    assert "worker_max_tasks_per_child has no effect in the pool threads" in replaced
    assert "cannot enforce the time limit of" in replaced.splitlines()[-1]


def shop_data(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def test_people_read_tables_and_the_end_first(shop: Home) -> None:
    ran = shop.run("umbel", "celery", "check", "-A", SHOP, "--all", SHOP_RESULTS="django-db")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[-1] == "Nothing that the project uses is unsupported: umbel worker can run it."
    assert sum(line.startswith("cassandra_") for line in lines) == 11
    assert any("recommended: django-db cannot count the parts of a chord safely" in line for line in lines)


def test_an_app_of_our_own_has_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "native.py").write_text("from umbel import App\napp = App('native')\n")
    ran = home(tmp_path).run("umbel", "celery", "check", "-A", "native")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "native is an umbel.App" in ran.stderr
