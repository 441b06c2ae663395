"""Where messages are: Celery's settings of the broker, of remote control and of events."""

from typing import Any

from umbel.celery.table.addresses import broker_url, schemes_of, tls_problem
from umbel.celery.table.verdicts import (
    Judged,
    Row,
    Verdict,
    client,
    differs,
    each,
    idle,
    refusal,
    unsupported,
    works,
)

BROKER_SCHEMES = (
    *("redis", "rediss", "redis+socket", "unix", "sentinel"),
    *("amqp", "amqps", "pyamqp", "gcpubsub"),
)
TRANSPORTS = ("redis", "rediss", "sentinel", "amqp", "amqps", "pyamqp", "gcpubsub", "")
_ALSO = "Redis, RabbitMQ and Google Pub/Sub are supported"
_LINKS = "the worker watches and restores its own links"
_MAILBOX = "the worker's mailbox is declared as Celery's defaults are; Celery's clients go on reading it"
_PARTS = "write it into broker_url"


def _url(value: Any) -> Judged | None:
    for scheme in schemes_of(value):
        if scheme not in BROKER_SCHEMES:
            return refusal(f"there is no broker for {scheme}:// here; {_ALSO}")
    return None


def _transport(value: Any) -> Judged | None:
    if str(value or "") in TRANSPORTS:
        return None
    return refusal(f"custom transports are not supported; {_ALSO}: broker_url = 'redis://…' or 'amqp://…'")


def _ssl(value: Any) -> Judged | None:
    problem = tls_problem(value)
    return refusal(problem) if problem else None


def _write_url(value: Any) -> Judged | None:
    return (
        None if not value else refusal("use one broker_url: retries and follow-ups go where tasks come from")
    )


ROWS: tuple[Row, ...] = (
    works(
        "broker_url",
        "the first address that answers, where there are several",
        ours="broker",
        read=broker_url,
        judge=_url,
    ),
    works("broker_read_url", "takes the place of broker_url", judge=_url),
    Row(
        "broker_write_url",
        Judged(Verdict.WORKS, "where it is broker_url; another one is refused"),
        judge=_write_url,
    ),
    works("broker_transport", judge=_transport),
    works("broker_transport_options", "`umbel celery check` lists each option for itself"),
    works("broker_connection_timeout", ours="connect_timeout_s"),
    idle("broker_connection_retry", "a running worker always reconnects"),
    differs(
        "broker_connection_retry_on_startup",
        "False: the worker ends at once if the broker is unavailable; else it waits a minute",
        ours="broker_connection_wait_s",
        read=lambda app: 0.0 if app.conf.broker_connection_retry_on_startup is False else None,
    ),
    idle(
        "broker_connection_max_retries",
        "a running worker never stops reconnecting; `broker_connection_wait_s` limits the start",
    ),
    idle("broker_channel_error_retry", _LINKS),
    idle("broker_failover_strategy", f"clients follow it; the worker tries addresses in order, and {_LINKS}"),
    idle("broker_heartbeat", f"clients follow it; {_LINKS}"),
    idle("broker_heartbeat_checkrate", _LINKS),
    Row(
        "broker_login_method",
        Judged(Verdict.WORKS, "PLAIN; no other one is supported"),
        judge=lambda value: None if value in (None, "PLAIN") else refusal("use PLAIN: user and password"),
    ),
    works("broker_native_delayed_delivery_queue_type", "the kind of the queues that delay messages"),
    works("broker_pool_limit", "clients, and what tasks send from child processes"),
    works("broker_pool_acquire_timeout", "clients, and what tasks send from child processes"),
    works("broker_use_ssl", "becomes a part of `broker`", judge=_ssl),
    *each(
        "broker",
        "host port user password vhost",
        lambda name: works(name, "becomes a part of `broker` where no broker_url is set"),
    ),
    *each(
        "control", "queue_ttl queue_expires queue_exclusive queue_durable", lambda name: idle(name, _MAILBOX)
    ),
    unsupported(
        "control_exchange",
        "leave it at 'celery': the worker's mailbox hears only this exchange",
        refused=False,
    ),
    *each(
        "event",
        "queue_expires queue_ttl queue_prefix queue_exclusive queue_durable",
        lambda name: client(name, "it is about who listens to events"),
    ),
    differs("event_serializer", "the worker sends its events as JSON"),
    unsupported("event_exchange", "leave it at 'celeryev': the worker sends its events there", refused=False),
    *each(
        "security",
        "certificate cert_store key key_password digest",
        lambda name: differs(
            name,
            "tasks are signed and verified by Celery in clients and child processes; events are not signed, "
            "and signed remote control requests are not understood",
        ),
    ),
)
