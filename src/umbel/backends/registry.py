"""Registry: opens the result backend for an address. Only the modules of that backend are loaded."""

from umbel.backends.interface import Backend
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import AMQP_SCHEMES, REDIS_SCHEMES, need_redis_extra
from umbel.errors import BadURL

_RPC = ("rpc", *AMQP_SCHEMES)
SCHEMES = ("sqlite", *REDIS_SCHEMES, *_RPC)


def sends_results(url: str) -> bool:
    """Whether results are sent to the client that sent the task, which must then give its reply address."""
    return url.partition(":")[0] in _RPC


def open_backend(url: str, settings: BrokerSettings) -> Backend:
    """Open the backend for this address; BadURL if there is none. `settings` are those of the broker."""
    scheme, colon, _ = url.partition(":")
    if scheme == "gcpubsub":
        raise BadURL(
            url, "Pub/Sub stores no results; set 'backend' to Redis (redis://...) or to sqlite:///FILE"
        )
    if not colon or scheme not in SCHEMES:
        raise BadURL(url, f"unknown backend scheme {scheme!r}; known schemes: {', '.join(SCHEMES)}")
    if scheme in REDIS_SCHEMES:
        need_redis_extra(url)
        from umbel.backends.redis import RedisBackend

        return RedisBackend(url, settings)
    if scheme in _RPC:
        return _open_rpc(url, settings)
    from umbel.backends.sqlite import SqliteBackend

    return SqliteBackend(url, settings)


def _open_rpc(url: str, settings: BrokerSettings) -> Backend:
    from umbel.backends.rpc import RpcBackend

    broker_url = settings.url if url.startswith("rpc:") else url
    scheme = broker_url.partition(":")[0]
    if scheme in REDIS_SCHEMES:
        need_redis_extra(broker_url)
        from umbel.backends.rpc_redis import RedisPost

        return RpcBackend(url, settings, RedisPost(broker_url, settings))
    if scheme not in _RPC:
        raise BadURL(
            url, f"results cannot be sent over {scheme}; leave 'backend' out, or use Redis or RabbitMQ"
        )
    from umbel.backends.rpc_amqp import AmqpPost

    return RpcBackend(url, settings, AmqpPost(broker_url, settings))
