"""Registry: from an address to the broker behind it. A broker's libraries load when it is asked for."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from msgspec.structs import replace

from umbel.brokers.interface import AsyncProducer, Broker, BrokerSettings, Producer
from umbel.errors import BadURL, NotSupported

if TYPE_CHECKING:
    from umbel.brokers.sqlite.look import Look

REDIS_SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
AMQP_SCHEMES = ("amqp", "amqps", "pyamqp")
_PUBSUB = ("gcpubsub",)
SCHEMES = ("sqlite", *REDIS_SCHEMES, *AMQP_SCHEMES, *_PUBSUB)


def open_broker(settings: BrokerSettings) -> Broker:
    """The asynchronous face; `open()` it in its event loop."""
    if settings.coordination_store:
        from umbel.brokers.composed.broker import ComposedBroker

        return ComposedBroker(*(open_broker(one) for one in _pair(settings)))
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


def open_producer(settings: BrokerSettings) -> Producer:
    if settings.coordination_store:
        from umbel.brokers.composed.producer import ComposedProducer

        return ComposedProducer(*(open_producer(one) for one in _pair(settings)))
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
    from umbel.brokers.sqlite.producer import SqliteProducer

    return SqliteProducer(settings)


def open_async_producer(settings: BrokerSettings) -> AsyncProducer:
    """For the clients of one event loop."""
    if settings.coordination_store:
        from umbel.brokers.composed.producer import ComposedAsyncProducer

        return ComposedAsyncProducer(*(open_async_producer(one) for one in _pair(settings)))
    scheme = _scheme(settings.url)
    if scheme in REDIS_SCHEMES:
        need_redis_extra(settings.url)
        from umbel.brokers.redis.async_producer import RedisAsyncProducer

        return RedisAsyncProducer(settings)
    if scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.async_producer import AmqpAsyncProducer

        return AmqpAsyncProducer(settings)
    if scheme in _PUBSUB:
        need_google_auth(settings.url)
        from umbel.brokers.gcpubsub.async_producer import PubsubAsyncProducer

        return PubsubAsyncProducer(settings)
    from umbel.brokers.sqlite.async_producer import SqliteAsyncProducer

    return SqliteAsyncProducer(settings)


def look_into(settings: BrokerSettings) -> "Look":
    """What the embedded broker's file holds, for who waits until its work is done."""
    from umbel.brokers.sqlite.look import Look

    return Look(settings)


def check_limits_on(settings: BrokerSettings, task: str) -> None:
    """Refuse a task with a limit for the cluster where the broker cannot keep one."""
    scheme = _scheme(settings.coordination_store or settings.url)
    if scheme in AMQP_SCHEMES:
        from umbel.brokers.amqp.capabilities import CAPABILITIES
    elif scheme in _PUBSUB:
        from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
    else:
        return
    raise NotSupported(f"task {task!r} cannot have a limit for the cluster: {CAPABILITIES.reasons['limits']}")


def need_redis_extra(url: str) -> None:
    """Redis takes an extra; say so instead of failing at some import."""
    for package in ("hiredis", "pybase64"):
        if find_spec(package) is None:
            raise BadURL(url, f"Redis needs the package {package}; pip install 'umbel[redis]'")


def need_google_auth(url: str) -> None:
    """Google's Pub/Sub takes an extra, an emulator none."""
    from umbel.brokers.gcpubsub.address import address_from_url

    address = address_from_url(url)
    if address.tls and not _is_there("google.auth"):
        raise BadURL(url, "Pub/Sub needs the package google-auth; pip install 'umbel[gcpubsub]'")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor what it is in
        return False


def _pair(settings: BrokerSettings) -> tuple[BrokerSettings, BrokerSettings]:
    """Of the broker of messages, and of its coordination store."""
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
