"""Celery's settings of the broker, remote control, events and results, with a verdict on each.

The addresses of the broker and of the results are converted to Umbel's format.
"""

from datetime import timedelta
from typing import Any

from umbel.brokers.options import with_sentinel, with_tls
from umbel.celery.verdicts import (
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
from umbel.errors import NotSupported
from umbel.text import each_url

# ---- addresses -------------------------------------------------------------------------------------

OURS = ("redis", "rediss", "unix", "sentinel", "rpc", "sqlite")  # result backends that Umbel implements
NAMES_OF_REDIS = {"redis+socket": "unix"}


def broker_url(app: Any) -> str:
    """Return the address of the broker. Several addresses are tried in order."""
    conf = app.conf
    stated = conf.broker_read_url or conf.broker_url or app.connection_for_read().as_uri(True)
    url = with_sentinel(";".join(map(_known, urls_of(stated))), conf.broker_transport_options or {})
    return _with_tls(url, conf.broker_use_ssl)


def backend_url(app: Any) -> str:
    """Return the address of the results if Umbel stores them; "" if Celery's backend stores them."""
    url = _known(str(app.conf.result_backend or ""))
    if scheme_of(url) not in OURS:
        return ""
    url = with_sentinel(url, app.conf.result_backend_transport_options or {})
    return _with_tls(url, app.conf.redis_backend_use_ssl)


def urls_of(stated: Any) -> list[str]:
    """Return the addresses in a setting, which may be a text, a list, or a text with several addresses."""
    if isinstance(stated, list | tuple):
        return [url for part in stated for url in urls_of(part)]
    return [url.strip() for url in each_url(str(stated or ""))]


def schemes_of(stated: Any) -> list[str]:
    """Return the scheme of each address in a setting."""
    return [scheme_of(url) for url in urls_of(stated) if url]


def scheme_of(url: str) -> str:
    """Return the part of an address before the first colon."""
    return url.partition(":")[0]


def tls_problem(stated: Any) -> str:
    """Return why an option of `…_use_ssl` cannot be converted to a part of an address; "" if all options
    can.
    """
    try:
        with_tls("rediss://", stated)
    except NotSupported as error:
        return str(error)
    return ""


def _known(url: str) -> str:
    """Return the address with Umbel's name of the scheme."""
    scheme = scheme_of(url)
    return url.replace(scheme, NAMES_OF_REDIS[scheme], 1) if scheme in NAMES_OF_REDIS else url


def _with_tls(url: str, stated: Any) -> str:
    """Add the options of `…_use_ssl` to an address."""
    return url if tls_problem(stated) else with_tls(url, stated)  # a worker with a problem does not start


# ---- broker ----------------------------------------------------------------------------------------

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
    """Return a refusal if a scheme has no broker in Umbel."""
    for scheme in schemes_of(value):
        if scheme not in BROKER_SCHEMES:
            return refusal(f"there is no broker for {scheme}:// here; {_ALSO}")
    return None


def _transport(value: Any) -> Judged | None:
    """Return a refusal for a custom transport."""
    if str(value or "") in TRANSPORTS:
        return None
    return refusal(f"custom transports are not supported; {_ALSO}: broker_url = 'redis://…' or 'amqp://…'")


def _ssl(value: Any) -> Judged | None:
    """Return a refusal if an option of `broker_use_ssl` is not supported."""
    problem = tls_problem(value)
    return refusal(problem) if problem else None


def _write_url(value: Any) -> Judged | None:
    """Return a refusal if messages would be sent to another broker."""
    return (
        None if not value else refusal("use one broker_url: retries and follow-ups go where tasks come from")
    )


BROKER_ROWS: tuple[Row, ...] = (
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


# ---- results ---------------------------------------------------------------------------------------

BACKEND = "the project's own result backend reads it, in clients and in the worker"
_IN_URL = "write it into result_backend, as redis://user:password@host:6379/0"
_STORED = "results in Redis are stored together with the acknowledgement, over the worker's own links"
NEVER_EXPIRES_S = 100 * 365 * 86_400.0


def seconds(stated: timedelta | float | None) -> float:
    """Convert a duration of a Celery setting to seconds. None means unlimited, which becomes a hundred
    years.
    """
    if stated is None:
        return NEVER_EXPIRES_S
    return stated.total_seconds() if isinstance(stated, timedelta) else float(stated)


# A safe backend stores which parts of a chord have ended. These backends only count the parts, so a part
# that is delivered twice counts twice, and then the body is never sent.
COUNTING_ONLY = {
    "django-db": "counts parts in a row of the database",
    "cache": "counts parts by incrementing a number",
    "dynamodb": "counts parts by incrementing a number",
    "gs": "counts parts by incrementing a number",
}


def backend_verdict(value: Any) -> Judged | None:
    """Return the verdict on a backend that Umbel does not implement; None for the others."""
    scheme = scheme_of(str(value or ""))
    if not value or scheme in (*OURS, "disabled", "redis+socket"):
        return None
    counting = COUNTING_ONLY.get(scheme.partition("+")[0])
    if counting:
        return Judged(
            Verdict.DIFFERS,
            f"Celery's backend stores before the acknowledgement, as ever. It {counting}: a part "
            "that is delivered twice counts twice, and the body may never be sent; use Redis for chords",
        )
    return Judged(Verdict.DIFFERS, "Celery's backend stores by itself, before the acknowledgement, as ever")


def _results_ssl(value: Any) -> Judged | None:
    problem = tls_problem(value)
    return refusal(problem) if problem else None


def _in_url(name: str) -> Row:
    return unsupported(name, _IN_URL)


def of_backend(name: str) -> Row:
    """Return the row of a setting that only the project's own backend reads."""
    return works(name, BACKEND)


RESULT_ROWS: tuple[Row, ...] = (
    works(
        "result_backend",
        "Redis and rpc:// are written with the acknowledgement in one step",
        ours="backend",
        read=backend_url,
        judge=backend_verdict,
    ),
    client("result_cache_max"),
    works("result_compression"),
    idle("result_exchange", "Celery 5 itself does not read it any more"),
    idle("result_exchange_type", "Celery 5 itself does not read it any more"),
    works(
        "result_expires",
        ours="result_expires_s",
        read=lambda app: seconds(app.conf.result_expires),
    ),
    works("result_chord_expires"),
    differs(
        "result_failure_expires",
        "failures in Redis are kept for result_expires, like every result",
    ),
    differs("result_persistent", "results that are sent back (rpc://) are not written to disk"),
    works("result_extended", ours="result_extended"),
    works("result_serializer"),
    works("result_backend_transport_options", "each option for itself"),
    works("result_chord_retry_interval"),
    works("result_chord_join_timeout"),
    *each(
        "result_backend",
        "max_sleep_between_retries_ms max_retries base_sleep_between_retries_ms always_retry",
        lambda name: differs(
            name, f"as ever in Celery's backends; {_STORED}, and the worker retries until they are stored"
        ),
    ),
    works("redis_backend_use_ssl", "becomes a part of `backend`", judge=_results_ssl),
    *each("redis", "db host username password port", _in_url),
    *each(
        "redis",
        "max_connections socket_timeout socket_connect_timeout retry_on_timeout socket_keepalive",
        lambda name: differs(name, f"clients and chords follow it; {_STORED}"),
    ),
    *each("cache", "backend backend_options", of_backend),
    *each(
        "cassandra",
        "entry_ttl keyspace port read_consistency servers bundle_path table write_consistency "
        "auth_provider auth_kwargs options",
        of_backend,
    ),
    *each("s3", "access_key_id secret_access_key bucket base_path endpoint_url region", of_backend),
    *each(
        "azureblockblob",
        "container_name retry_initial_backoff_sec retry_increment_base retry_max_attempts base_path "
        "connection_timeout read_timeout",
        of_backend,
    ),
    *each("gcs", "bucket project base_path ttl", of_backend),
    *each("couchbase", "backend_settings", of_backend),
    *each("arangodb", "backend_settings", of_backend),
    *each("mongodb", "backend_settings", of_backend),
    *each(
        "cosmosdbsql",
        "database_name collection_name consistency_level max_retry_attempts max_retry_wait_time",
        of_backend,
    ),
    *each("elasticsearch", "retry_on_timeout max_retries timeout save_meta_as_text", of_backend),
    *each(
        "database",
        "url engine_options engine_callback short_lived_sessions table_schemas table_names "
        "create_tables_at_setup",
        of_backend,
    ),
)
