"""Registry: opens the broker for an address. The libraries of a broker load when it is opened."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from msgspec.structs import replace

from umbel.brokers.interface import AsyncProducer, Broker, BrokerSettings, Producer
from umbel.brokers.interface.connection import Reserved, why_reserved
from umbel.errors import BadURL, BrokerRefused, NotSupported

if TYPE_CHECKING:
    from umbel.brokers.sqlite.clients import PendingWork

REDIS_SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
AMQP_SCHEMES = ("amqp", "amqps", "pyamqp")
_PUBSUB = ("gcpubsub",)
SCHEMES = ("sqlite", *REDIS_SCHEMES, *AMQP_SCHEMES, *_PUBSUB)


def open_broker(settings: BrokerSettings) -> Broker:
    """The asynchronous broker for a worker or command; call its `open()` in its event loop."""
    if settings.coordination_store:
        return _open_composed(settings)
    scheme = _scheme(settings.url)
    if scheme in REDIS_SCHEMES:
        need_redis_extra(settings.url)
        from umbel.brokers.redis.broker import RedisBroker

        return RedisBroker(settings)
    if scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.broker import AmqpBroker

        return AmqpBroker(settings)
    if scheme in _PUBSUB:
        need_google_auth(settings.url)
        from umbel.brokers.gcpubsub.broker import PubsubBroker

        return PubsubBroker(settings)
    from umbel.brokers.sqlite.broker import SqliteBroker

    return SqliteBroker(settings)


def _open_composed(settings: BrokerSettings) -> Broker:
    from umbel.brokers.composed.broker import ComposedBroker
    from umbel.brokers.gcpubsub.broker import PubsubBroker

    of_messages, of_store = _pair(settings)
    need_google_auth(of_messages.url)
    store = open_broker(of_store)
    release = store.coordination.release_unique if store.capabilities.unique else None
    return ComposedBroker(PubsubBroker(of_messages, release), store)


def open_producer(settings: BrokerSettings) -> Producer:
    """The synchronous producer for clients and running tasks."""
    if settings.coordination_store:
        from umbel.brokers.composed.producer import ComposedProducer

        return ComposedProducer(*(open_producer(part) for part in _pair(settings)))
    scheme = _scheme(settings.url)
    if scheme in REDIS_SCHEMES:
        need_redis_extra(settings.url)
        from umbel.brokers.redis.producer import RedisProducer

        return RedisProducer(settings)
    if scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.producer import AmqpProducer

        return AmqpProducer(settings)
    if scheme in _PUBSUB:
        need_google_auth(settings.url)
        from umbel.brokers.gcpubsub.producer import PubsubProducer

        return PubsubProducer(settings)
    from umbel.brokers.sqlite.clients import SqliteProducer

    return SqliteProducer(settings)


def open_async_producer(settings: BrokerSettings) -> AsyncProducer:
    """The producer for the clients of one event loop."""
    if settings.coordination_store:
        from umbel.brokers.composed.producer import ComposedAsyncProducer

        return ComposedAsyncProducer(*(open_async_producer(part) for part in _pair(settings)))
    scheme = _scheme(settings.url)
    if scheme in REDIS_SCHEMES:
        need_redis_extra(settings.url)
        from umbel.brokers.redis.producer import RedisAsyncProducer

        return RedisAsyncProducer(settings)
    if scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.publisher import AmqpAsyncProducer

        return AmqpAsyncProducer(settings)
    if scheme in _PUBSUB:
        need_google_auth(settings.url)
        from umbel.brokers.gcpubsub.service import PubsubAsyncProducer

        return PubsubAsyncProducer(settings)
    from umbel.brokers.sqlite.clients import SqliteAsyncProducer

    return SqliteAsyncProducer(settings)


def look_into(settings: BrokerSettings) -> "PendingWork":
    """A view of the pending work in the embedded broker's file, for tests that wait for it."""
    from umbel.brokers.sqlite.clients import PendingWork

    return PendingWork(settings)


def check_limits_on(settings: BrokerSettings, task: str) -> None:
    """Raise NotSupported for a task with a cluster limit if the broker has no such limits."""
    scheme = _scheme(settings.coordination_store or settings.url)
    if scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.topology import CAPABILITIES
    elif scheme in _PUBSUB:
        from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
    else:
        return
    raise NotSupported(f"task {task!r} cannot have a limit for the cluster: {CAPABILITIES.reasons['limits']}")


def refuse_reserved_on(settings: BrokerSettings, queue: str) -> None:
    """Raise BrokerRefused for a reserved queue name, without a connection; a broker itself refuses it too."""
    reserved: Reserved = {}
    scheme = settings.url.partition(":")[0]  # an invalid address is reported where it is opened
    if scheme in REDIS_SCHEMES:
        from umbel.brokers.redis.keys import RESERVED

        reserved = RESERVED
    elif scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.topology import CAPABILITIES as OF_AMQP

        reserved = OF_AMQP.reserved
    elif scheme in _PUBSUB:
        from umbel.brokers.gcpubsub.capabilities import CAPABILITIES as OF_PUBSUB

        reserved = OF_PUBSUB.reserved
    if why := why_reserved(reserved, queue):
        raise BrokerRefused(f"cannot send a message: {why}")


def need_redis_extra(url: str) -> None:
    """Raise BadURL if the packages for Redis are missing, before an import fails."""
    for package in ("hiredis", "pybase64"):
        if find_spec(package) is None:
            raise BadURL(url, f"Redis needs the package {package}; pip install 'umbel[redis]'")


def need_google_auth(url: str) -> None:
    """Raise BadURL if Pub/Sub needs google-auth and it is missing; an emulator needs none."""
    from umbel.brokers.gcpubsub.http import address_from_url

    address = address_from_url(url)
    if address.tls and not _is_there("google.auth"):
        raise BadURL(url, "Pub/Sub needs the package google-auth; pip install 'umbel[gcpubsub]'")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it is missing, too
        return False


def _pair(settings: BrokerSettings) -> tuple[BrokerSettings, BrokerSettings]:
    """The settings for the broker of messages, and for its coordination store."""
    store = settings.coordination_store
    if _scheme(settings.url) not in _PUBSUB:
        raise BadURL(
            store, "only gcpubsub:// needs a coordination store, the other brokers are their own; remove it"
        )
    if _scheme(store) in _PUBSUB:
        raise BadURL(store, "Pub/Sub cannot be a coordination store; use Redis, RabbitMQ or a file of SQLite")
    return replace(settings, coordination_store=""), replace(settings, url=store, coordination_store="")


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in SCHEMES:
        raise BadURL(url, f"unknown broker scheme {scheme!r}; known schemes: {', '.join(SCHEMES)}")
    return scheme
