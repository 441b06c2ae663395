"""Addresses: where a Celery app says its broker and its results are, as Umbel writes such addresses."""

from typing import Any

from umbel.brokers.options import with_sentinel, with_tls
from umbel.errors import NotSupported
from umbel.urls import each_url

OURS = ("redis", "rediss", "unix", "sentinel", "rpc", "sqlite")  # result backends that Umbel speaks itself
NAMES_OF_REDIS = {"redis+socket": "unix"}


def broker_url(app: Any) -> str:
    """Where messages are; several addresses are tried in order."""
    conf = app.conf
    stated = conf.broker_read_url or conf.broker_url or app.connection_for_read().as_uri(True)
    url = with_sentinel(";".join(map(_known, urls_of(stated))), conf.broker_transport_options or {})
    return _with_tls(url, conf.broker_use_ssl)


def backend_url(app: Any) -> str:
    """The address of the results where Umbel stores them itself; else "", and Celery's backend does."""
    url = _known(str(app.conf.result_backend or ""))
    if scheme_of(url) not in OURS:
        return ""
    url = with_sentinel(url, app.conf.result_backend_transport_options or {})
    return _with_tls(url, app.conf.redis_backend_use_ssl)


def urls_of(stated: Any) -> list[str]:
    if isinstance(stated, list | tuple):
        return [url for one in stated for url in urls_of(one)]
    return [url.strip() for url in each_url(str(stated or ""))]


def schemes_of(stated: Any) -> list[str]:
    return [scheme_of(url) for url in urls_of(stated) if url]


def scheme_of(url: str) -> str:
    return url.partition(":")[0]


def tls_problem(stated: Any) -> str:
    """Why an option of `…_use_ssl` cannot be a part of our addresses; "" when all can."""
    try:
        with_tls("rediss://", stated)
    except NotSupported as error:
        return str(error)
    return ""


def _known(url: str) -> str:
    scheme = scheme_of(url)
    return url.replace(scheme, NAMES_OF_REDIS[scheme], 1) if scheme in NAMES_OF_REDIS else url


def _with_tls(url: str, stated: Any) -> str:
    return (
        url if tls_problem(stated) else with_tls(url, stated)
    )  # a problem is refused before a worker starts
