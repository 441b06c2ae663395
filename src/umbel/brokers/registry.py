"""Registry: opens the broker, or a producer, for an address. Only the modules of that broker are loaded."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from umbel.brokers.interface import AsyncProducer, Broker, BrokerSettings, Capabilities, Producer
from umbel.brokers.interface.connection import why_reserved
from umbel.errors import BadURL, BrokerRefused, NotSupported

if TYPE_CHECKING:
    from umbel.brokers.sqlite.cluster_store import PendingWork


def need_redis_extra(url: str) -> None:
    """Raise BadURL if the packages for Redis are missing, before an import fails."""
    for package in ("hiredis", "pybase64"):
        if find_spec(package) is None:
            raise BadURL(url, f"Redis needs the package {package}; pip install 'umbel[redis]'")


def need_google_auth(url: str) -> None:
    """Raise BadURL if Pub/Sub needs google-auth and it is missing; an emulator needs none."""
    from umbel.brokers.gcpubsub.http import address_from_url

    if not address_from_url(url).tls:
        return
    try:
        is_installed = find_spec("google.auth") is not None
    except ModuleNotFoundError:  # the package `google` is missing, too
        is_installed = False
    if not is_installed:
        raise BadURL(url, "Pub/Sub needs the package google-auth; pip install 'umbel[gcpubsub]'")


class _Parts(NamedTuple):
    """Where the classes of a broker are, as `module:name`; `check` raises BadURL if a package is missing."""

    broker: str
    producer: str
    async_producer: str
    capabilities: str
    check: Callable[[str], None] = lambda _: None


_SQLITE = _Parts(
    "sqlite.broker:SqliteBroker",
    "sqlite.cluster_store:SqliteProducer",
    "sqlite.thread:SqliteAsyncProducer",
    "sqlite.store:CAPABILITIES",
)
_REDIS = _Parts(
    "redis.broker:RedisBroker",
    "redis.producer:RedisProducer",
    "redis.async_producer:RedisAsyncProducer",
    "redis.keys:CAPABILITIES",
    need_redis_extra,
)
_AMQP = _Parts(
    "amqp.broker:AmqpBroker",
    "amqp.producer:AmqpProducer",
    "amqp.publisher:AmqpAsyncProducer",
    "amqp.topology:CAPABILITIES",
)
_PUBSUB = _Parts(
    "gcpubsub.broker:PubsubBroker",
    "gcpubsub.producer:PubsubProducer",
    "gcpubsub.service:PubsubAsyncProducer",
    "gcpubsub.capabilities:CAPABILITIES",
    need_google_auth,
)
REDIS_SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
AMQP_SCHEMES = ("amqp", "amqps", "pyamqp")
_BY_SCHEME = {
    "sqlite": _SQLITE,
    **dict.fromkeys(REDIS_SCHEMES, _REDIS),
    **dict.fromkeys(AMQP_SCHEMES, _AMQP),
    "gcpubsub": _PUBSUB,
}
SCHEMES = tuple(_BY_SCHEME)


def open_broker(settings: BrokerSettings) -> Broker:
    """Return the asynchronous broker for a worker or command; call its `open()` in its event loop."""
    if not settings.coordination_store:
        broker: Broker = _open("broker", settings)
        return broker
    from umbel.brokers.composed.broker import ComposedBroker

    of_messages, of_store = _pair(settings)
    store = open_broker(of_store)
    release = store.coordination.release_unique if store.capabilities.unique else None
    return ComposedBroker(_open("broker", of_messages, release), store)


def open_producer(settings: BrokerSettings) -> Producer:
    """Return the synchronous producer for clients and running tasks."""
    if not settings.coordination_store:
        producer: Producer = _open("producer", settings)
        return producer
    from umbel.brokers.composed.producer import ComposedProducer

    return ComposedProducer(*map(open_producer, _pair(settings)))


def open_async_producer(settings: BrokerSettings) -> AsyncProducer:
    """Return the producer for the clients of one event loop."""
    if not settings.coordination_store:
        producer: AsyncProducer = _open("async_producer", settings)
        return producer
    from umbel.brokers.composed.producer import ComposedAsyncProducer

    return ComposedAsyncProducer(*map(open_async_producer, _pair(settings)))


def look_into(settings: BrokerSettings) -> "PendingWork":
    """Return a view of the pending work in the embedded broker's file, for tests that wait for it."""
    from umbel.brokers.sqlite.cluster_store import PendingWork

    return PendingWork(settings)


def check_limits_on(settings: BrokerSettings, task: str) -> None:
    """Raise NotSupported for a task with a cluster limit if the broker has no such limits."""
    capabilities: Capabilities = _load(_parts(settings.coordination_store or settings.url).capabilities)
    if not capabilities.limits:
        why = capabilities.reasons["limits"]
        raise NotSupported(f"task {task!r} cannot have a limit for the cluster: {why}")


def refuse_reserved_on(settings: BrokerSettings, queue: str) -> None:
    """Raise BrokerRefused for a reserved queue name, without a connection; a broker itself refuses it too."""
    parts = _BY_SCHEME.get(settings.url.partition(":")[0])
    if parts is None:  # the address is invalid, which is reported where it is opened
        return
    capabilities: Capabilities = _load(parts.capabilities)
    if why := why_reserved(capabilities.reserved, queue):
        raise BrokerRefused(f"cannot send a message: {why}")


def _pair(settings: BrokerSettings) -> tuple[BrokerSettings, BrokerSettings]:
    """Return the settings for the broker of messages, and for its coordination store."""
    store = settings.coordination_store
    if _parts(settings.url) is not _PUBSUB:
        raise BadURL(
            store, "only gcpubsub:// needs a coordination store, the other brokers are their own; remove it"
        )
    if _parts(store) is _PUBSUB:
        raise BadURL(store, "Pub/Sub cannot be a coordination store; use Redis, RabbitMQ or a file of SQLite")
    return replace(settings, coordination_store=""), replace(settings, url=store, coordination_store="")


def _open(part: str, settings: BrokerSettings, *arguments: object) -> Any:
    parts = _parts(settings.url)
    parts.check(settings.url)
    return _load(getattr(parts, part))(settings, *arguments)


def _parts(url: str) -> _Parts:
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in SCHEMES:
        raise BadURL(url, f"unknown broker scheme {scheme!r}; known schemes: {', '.join(SCHEMES)}")
    return _BY_SCHEME[scheme]


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"umbel.brokers.{module}"), attribute)
