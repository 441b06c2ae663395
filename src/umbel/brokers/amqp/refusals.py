"""Refusals: what it means when RabbitMQ closes a channel or a connection, decided in one place.

Four answers. `ChannelClosed` is a no to this one request, by its code: not there, locked, made
otherwise, not permitted. `AccessRefused` is a no to all, as of a right without which nothing works.
`BrokerStarting` is a not yet: a node opens its port before the queues, and above all the
streams and quorum queues, have found their leaders again, and until then it answers as if they
were lost. It is a kind of `BrokerUnavailable`, so code that retries after a refused connection
retries after this too. Everything else that ends a connection is `BrokerUnavailable`, in words a
person can act on: a wrong password does not become right by waiting.
"""

from shlex import quote

from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.rights import ACCESS_REFUSED, CONFIGURE, MissingRight, granting, missing_right
from umbel.brokers.tls import tls_refusal
from umbel.errors import AccessRefused, BrokerError, BrokerRefused, BrokerSilent, BrokerUnavailable

_NOT_ALLOWED = 530
_FORCED, _RESOURCE_ERROR, _INTERNAL_ERROR = 320, 506, 541

# RabbitMQ's own words (3.10 to 4.1). Their codes say nothing: a queue whose node is not up yet is
# 404, as one that does not exist; a late ack "timed out" too, with 406, and is a no.
_NOT_YET = (
    "is down or inaccessible",
    "does not have a replica on the local node",  # of a stream that somebody makes just now
    "due to timeout",
    "timeout occurred during consume operation",
    "process is stopped by supervisor",
    "coordinator unavailable",
    "coordinator_unavailable",
)
_HOST_NOT_YET = "is down"
FULL = "its queue is full and refuses more (x-overflow: reject-publish); drain it or raise its limit"


class ChannelClosed(BrokerRefused):
    """The server refused something by closing the channel."""

    NOT_FOUND, LOCKED, PRECONDITION = 404, 405, 406

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ refused: {text}" + (f" ({code})" if code != ACCESS_REFUSED else ""))
        self.code = code
        self.text = text


class NotPermitted(ChannelClosed):
    """The user lacks a right to this queue or exchange."""

    def __init__(self, missing: MissingRight) -> None:
        super().__init__(ACCESS_REFUSED, missing.words)
        self.may_configure = missing.right != CONFIGURE


class Undecided(BrokerUnavailable):
    """One of several batches closed their channel: which one, and what was accepted, is not known."""

    def __init__(self, closed: ChannelClosed) -> None:
        super().__init__(f"one of several messages made RabbitMQ close their channel: {closed.text}")
        self.closed = closed


class QueueRefused(BrokerRefused):
    """One queue cannot be declared or consumed; others are not concerned."""

    def __init__(self, queue: str, refused: BrokerRefused) -> None:
        super().__init__(f"cannot consume the queue {queue!r}: {refused}")
        self.queue = queue
        self.is_missing = isinstance(refused, ChannelClosed) and refused.code == ChannelClosed.NOT_FOUND


class BrokerStarting(BrokerUnavailable):
    """The server runs, and what was asked for is not back yet: it starts, or chooses a leader."""

    def __init__(self, location: Location, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ at {location} is not ready: {text} ({code}); try again in a moment")


def channel_refusal(location: Location, code: int, text: str, method: int = 0) -> BrokerError:
    """What a channel that the server closed means, and what it was asked last."""
    if code == ACCESS_REFUSED:
        right = missing_right(location, text, method)
        if right.is_shared:
            return AccessRefused(f"RabbitMQ at {location.host}:{location.port} refused: {right.words}")
        return NotPermitted(right)
    if code in (_RESOURCE_ERROR, _INTERNAL_ERROR) or any(words in text for words in _NOT_YET):
        return BrokerStarting(location, code, text)
    return ChannelClosed(code, text)


def connection_refusal(location: Location, code: int, text: str) -> BrokerUnavailable:
    """What a connection that the server closed means."""
    if code in (_FORCED, _INTERNAL_ERROR) or (code == _NOT_ALLOWED and text.endswith(_HOST_NOT_YET)):
        return BrokerStarting(location, code, text)
    refused = AccessRefused if code in (ACCESS_REFUSED, _NOT_ALLOWED) else BrokerUnavailable
    return refused(_remedy(location, code, text))


def blocked_by(location: Location, why: str, *, is_written: bool = False) -> BrokerUnavailable:
    """The server has a resource alarm, and reads nothing from who publishes until that is over."""
    remedy = (
        "let queues drain, free memory or disk there, or change vm_memory_high_watermark or disk_free_limit"
    )
    late = "; what was sent may still arrive then" if is_written else ""
    return BrokerUnavailable(f"RabbitMQ at {location} does not accept messages now ({why}): {remedy}{late}")


def unreachable(location: Location, error: BaseException) -> BrokerUnavailable:
    """A connection that could not be opened."""
    where = f"cannot reach RabbitMQ at {location}"
    if isinstance(error, TimeoutError):
        return BrokerSilent(
            f"{where}: no answer within the connect time-out; is it running, and are host and port right?"
        )
    if location.tls and (refused := tls_refusal(where, error, dict(location.tls_options))) is not None:
        return refused
    if isinstance(error, ConnectionRefusedError):
        why = "connection refused; is it running, and are host and port right?"
    elif isinstance(error, ConnectionResetError):
        why = "the server closed the connection; is this its AMQP port? For a TLS port use amqps://"
    else:
        why = f"{str(error) or type(error).__name__}; is it running, and are host and port right?"
    return BrokerUnavailable(f"{where}: {why}")


def _remedy(location: Location, code: int, text: str) -> str:
    where = f"RabbitMQ at {location.host}:{location.port}"
    if code == ACCESS_REFUSED and "ACCESS_REFUSED - Login" in text:
        return (
            f"{where} refused the login of the user {location.user!r}: check user and password in the address"
        )
    if code == _NOT_ALLOWED and "not found" in text:
        remedy = (
            f"check the path of the address, or add it with rabbitmqctl add_vhost {quote(location.vhost)}"
        )
        return f"{where} has no virtual host {location.vhost!r}; {remedy}"
    if code == _NOT_ALLOWED and "refused" in text:
        use = f"the user {location.user!r} may not use the virtual host {location.vhost!r}"
        return f"{where} refused: {use}; {granting(location)}"
    return f"RabbitMQ at {location} closed the connection: {text} ({code})"
