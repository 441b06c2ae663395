"""Every setting of Celery's has a verdict, and what is mapped is mapped by the same table."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.celery_apps.programs import home
from umbel.app.settings import Settings
from umbel.celery.connection_settings import backend_url, broker_url
from umbel.celery.settings_table import TABLE
from umbel.celery.verdicts import SIGNALS, Judged, Verdict


def test_each_setting_and_signal_of_celerys_has_a_verdict(tmp_path: Path) -> None:
    known = home(tmp_path).data("tests.celery_apps.defaults")
    assert sorted(TABLE) == known["settings"]
    assert sorted(SIGNALS) == known["signals"]


def test_what_a_setting_becomes_is_a_setting_of_ours_and_becomes_so_once() -> None:
    ours = [row.ours for row in TABLE.values() if row.ours]
    assert set(ours) <= {field.name for field in msgspec.structs.fields(Settings)}
    assert len(ours) == len(set(ours))


def test_who_is_not_served_is_told_what_to_do() -> None:
    silent = [
        name for name, row in TABLE.items() if row.judged.verdict is not Verdict.WORKS and not row.judged.note
    ]
    assert silent == []


def judged(name: str, value: Any) -> Judged:
    return TABLE[name].verdict_on(value)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("broker_url", "sqs://key:secret@", "sqs://"),
        ("broker_url", "memory://", "memory://"),
        ("broker_transport", "my.transports:Own", "custom transports"),
        ("broker_write_url", "amqp://elsewhere", "one broker_url"),
        ("broker_use_ssl", {"ssl_ciphers": "ALL"}, "ssl_ciphers"),
        ("broker_login_method", "EXTERNAL", "PLAIN"),
        ("redis_host", "results", "result_backend"),
        ("worker_pool", "eventlet", "gevent"),
        ("worker_pool", "my.pools:Own", "of your own"),
        ("worker_agent", "my.agents:Agent", "not supported"),
        ("worker_consumer", "my.consumers:Own", "of your own"),
        ("worker_autoscaler", "my.autoscalers:Own", "--autoscale"),
        ("worker_direct", True, "-Q"),
    ],
)
def test_what_would_lose_tasks_is_refused_with_a_remedy(name: str, value: Any, named: str) -> None:
    found = judged(name, value)
    assert (found.verdict, found.refused) == (Verdict.NOT_SUPPORTED, True)
    assert named in found.note


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("broker_url", "pyamqp://guest@localhost//", Verdict.WORKS),
        ("worker_pool", "celery.concurrency.thread:TaskPool", Verdict.WORKS),
        ("worker_pool", "processes", Verdict.WORKS),
        ("timezone", "UTC", Verdict.WORKS),
        ("timezone", "Europe/Berlin", Verdict.DIFFERS),
        ("result_backend", "redis://localhost/1", Verdict.WORKS),
        ("result_backend", "django-db", Verdict.DIFFERS),
        ("result_backend", "db+sqlite:///results.db", Verdict.DIFFERS),
        ("control_exchange", "shop", Verdict.NOT_SUPPORTED),
        ("worker_state_db", "/var/run/state", Verdict.NO_EFFECT),
    ],
)
def test_the_value_decides(name: str, value: Any, verdict: Verdict) -> None:
    assert judged(name, value).verdict is verdict


def test_a_backend_that_only_counts_the_parts_of_a_chord_is_named() -> None:
    assert "never be sent" in judged("result_backend", "django-db").note
    assert "never be sent" in judged("result_backend", "cache+memcached://127.0.0.1").note
    assert "never be sent" not in judged("result_backend", "db+sqlite:///results.db").note


def app(**settings: Any) -> Any:
    unset = ("broker_read_url", "broker_use_ssl", "result_backend", "redis_backend_use_ssl")
    options = ("broker_transport_options", "result_backend_transport_options")
    return SimpleNamespace(conf=SimpleNamespace(**dict.fromkeys(unset + options) | settings))


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"broker_url": "redis+socket:///run/redis.sock"}, "unix:///run/redis.sock"),
        ({"broker_url": ["amqp://a//", "amqp://b//"]}, "amqp://a//;amqp://b//"),
        ({"broker_url": "amqp://a//;amqp://b//"}, "amqp://a//;amqp://b//"),
        ({"broker_url": "amqp://a//", "broker_use_ssl": True}, "amqps://a//"),
        (
            {
                "broker_url": "pyamqp://a//",
                "broker_use_ssl": {"ca_certs": "/ca.pem", "cert_reqs": "CERT_REQUIRED"},
            },
            "amqps://a//?ssl_ca_certs=%2Fca.pem&ssl_cert_reqs=required",
        ),
        (
            {"broker_url": "rediss://a?x=1", "broker_use_ssl": {"ssl_cert_reqs": None, "ssl_keyfile": "/k"}},
            "rediss://a?x=1&ssl_keyfile=%2Fk",
        ),
        (
            {
                "broker_url": "rediss://a",
                "broker_use_ssl": {"ssl_cert_reqs": SimpleNamespace(name="CERT_NONE")},
            },
            "rediss://a?ssl_cert_reqs=none",
        ),
        (
            {"broker_url": "sentinel://a/1", "broker_transport_options": {"master_name": "m"}},
            "sentinel://a/1?master_name=m",
        ),
    ],
)
def test_the_brokers_address_keeps_all_that_the_settings_say(settings: dict[str, Any], url: str) -> None:
    assert broker_url(app(**settings)) == url


@pytest.mark.parametrize(
    ("stated", "url"),
    [("redis://a/1", "redis://a/1"), ("rpc://", "rpc://"), ("django-db", ""), (None, "")],
)
def test_results_that_only_celery_knows_have_no_address(stated: str | None, url: str) -> None:
    assert backend_url(app(result_backend=stated)) == url
