"""Addresses: where a Celery app says its broker and its results are, as Umbel writes such addresses."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from umbel.brokers.tls import TLS_OPTIONS
from umbel.urls import each_url

OURS = ("redis", "rediss", "unix", "rpc", "sqlite")  # result backends that Umbel speaks itself
NAMES_OF_REDIS = {"redis+socket": "unix"}
WITH_TLS = {"redis": "rediss", "amqp": "amqps", "pyamqp": "amqps"}
TLS_NAMES = tuple(name.removeprefix("ssl_") for name in TLS_OPTIONS)


def broker_url(app: Any) -> str:
    """Where messages are; several addresses are tried in order."""
    conf = app.conf
    stated = conf.broker_read_url or conf.broker_url or app.connection_for_read().as_uri(True)
    return ";".join(_with_tls(_known(url), conf.broker_use_ssl) for url in urls_of(stated))


def backend_url(app: Any) -> str:
    """The address of the results where Umbel stores them itself; else "", and Celery's backend does."""
    url = _known(str(app.conf.result_backend or ""))
    return _with_tls(url, app.conf.redis_backend_use_ssl) if scheme_of(url) in OURS else ""


def urls_of(stated: Any) -> list[str]:
    if isinstance(stated, list | tuple):
        return [url for one in stated for url in urls_of(one)]
    return [url.strip() for url in each_url(str(stated or ""))]


def schemes_of(stated: Any) -> list[str]:
    return [scheme_of(url) for url in urls_of(stated) if url]


def scheme_of(url: str) -> str:
    return url.partition(":")[0]


def unknown_tls(stated: Any) -> list[str]:
    """Options of `…_use_ssl` that have no counterpart in our addresses."""
    return [name for name in _tls_options(stated) if name not in TLS_OPTIONS]


def _known(url: str) -> str:
    scheme = scheme_of(url)
    return url.replace(scheme, NAMES_OF_REDIS[scheme], 1) if scheme in NAMES_OF_REDIS else url


def _with_tls(url: str, stated: Any) -> str:
    """Celery's users write options of TLS beside the address, or after its `?`, as ours stand."""
    if not stated or scheme_of(url) not in (*WITH_TLS, *WITH_TLS.values()):
        return url
    scheme = scheme_of(url)
    secure = url.replace(scheme, WITH_TLS.get(scheme, scheme), 1)
    options = {
        name: value
        for name, value in _tls_options(stated).items()
        if name in TLS_OPTIONS and f"{name}=" not in secure
    }
    return f"{secure}{'&' if '?' in secure else '?'}{urlencode(options)}" if options else secure


def _tls_options(stated: Any) -> dict[str, str]:
    """With RabbitMQ the names are those of Python's ssl module, with Redis they begin with `ssl_`."""
    if not isinstance(stated, Mapping):
        return {}
    named = {
        name if name.startswith("ssl_") else f"ssl_{name}": value
        for name, value in stated.items()
        if value is not None
    }
    return {name: _tls_value(name, value) for name, value in named.items()}


def _tls_value(name: str, value: Any) -> str:
    text = str(getattr(value, "name", value)).lower()
    if name == "ssl_cert_reqs":
        return "none" if text in ("cert_none", "none", "0") else "required"
    return text if name == "ssl_check_hostname" else str(value)
