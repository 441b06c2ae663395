"""Registry: from an address to the broker behind it. A broker's libraries load when it is asked for."""

from umbel.brokers.interface import Broker, BrokerSettings, Producer
from umbel.errors import BadURL

SCHEMES = ("sqlite",)


def open_broker(settings: BrokerSettings) -> Broker:
    """The asynchronous face; `open()` it in its event loop."""
    _check(settings.url)
    from umbel.brokers.sqlite.broker import SqliteBroker

    return SqliteBroker(settings)


def open_producer(settings: BrokerSettings) -> Producer:
    _check(settings.url)
    from umbel.brokers.sqlite.producer import SqliteProducer

    return SqliteProducer(settings)


def _check(url: str) -> None:
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in SCHEMES:
        raise BadURL(url, f"no broker has the scheme {scheme!r}; schemes known here: {', '.join(SCHEMES)}")
