"""Where results are: Celery's settings of the result backends."""

from datetime import timedelta
from typing import Any

from umbel.celery.table.addresses import OURS, backend_url, scheme_of, tls_problem
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

BACKEND = "the project's own result backend reads it, in clients and in the worker"
_IN_URL = "write it into result_backend, as redis://user:password@host:6379/0"
_STORED = "results in Redis are stored together with the acknowledgement, over the worker's own links"
FOR_EVER_S = 100 * 365 * 86_400.0


def seconds(stated: timedelta | float | None) -> float:
    """A duration as Celery's users write it; None is for ever, which a hundred years are to us."""
    if stated is None:
        return FOR_EVER_S
    return stated.total_seconds() if isinstance(stated, timedelta) else float(stated)


# Of a chord's parts a backend must remember which have come. These only count: a part that is delivered
# twice counts twice, and the body is then never sent.
COUNTING_ONLY = {
    "django-db": "counts parts in a row of the database",
    "cache": "counts parts by incrementing a number",
    "dynamodb": "counts parts by incrementing a number",
    "gs": "counts parts by incrementing a number",
}


def backend_verdict(value: Any) -> Judged | None:
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


def _ssl(value: Any) -> Judged | None:
    problem = tls_problem(value)
    return refusal(problem) if problem else None


def _in_url(name: str) -> Row:
    return unsupported(name, _IN_URL)


def of_backend(name: str) -> Row:
    return works(name, BACKEND)


ROWS: tuple[Row, ...] = (
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
    works("redis_backend_use_ssl", "becomes a part of `backend`", judge=_ssl),
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
