"""What a Redis server says when it refuses, in words that tell what to do."""

from typing import Any

import hiredis

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.rights import missing_right
from umbel.brokers.tls import tls_refusal
from umbel.errors import (
    AccessRefused,
    BrokerError,
    BrokerRefused,
    BrokerSilent,
    BrokerUnavailable,
    StorageFull,
)

NO_SCRIPT = "NOSCRIPT"
REFUSED = "REFUSED "  # how the scripts begin what they say themselves


class ServerRefused(BrokerRefused):
    """An error reply that is about the command, not about the server's state."""


class NotPrimary(BrokerUnavailable):
    """The server only follows another; which one must be looked up again."""


def error_of(reply: hiredis.ReplyError, address: Address) -> BrokerError:
    text = str(reply)
    code = text.partition(" ")[0]
    where = f"Redis at {address.shown}"
    if (right := missing_right(text, address.username or "default")) is not None:
        # A key concerns one queue or result, the others everything.
        refused = ServerRefused if right.is_key else AccessRefused
        return refused(f"{where} does not permit {right.words}")
    match code:
        case "NOAUTH":
            return AccessRefused(f"{where} requires a password; write redis://:password@host:port/database")
        case "WRONGPASS":
            return AccessRefused(f"{where} refuses the user name or password; check them in the address")
        case "OOM":
            return StorageFull(f"{where} is at its memory limit (maxmemory); free some memory or raise it")
        case "LOADING":
            return BrokerUnavailable(f"{where} is still loading its data; try again in a moment")
        case "READONLY" | "MASTERDOWN":
            return NotPrimary(f"{where} is a read-only replica; use the address of the primary")
        case "MISCONF" | "BUSY" | "NOREPLICAS" | "CLUSTERDOWN":
            return BrokerUnavailable(f"{where} does not accept writes now: {text}")
    if "cluster mode" in text:
        return _in_cluster(address)
    if "DB index is out of range" in text or "invalid DB index" in text:
        return AccessRefused(
            f"{where} has no database {address.database}; choose a smaller number, or raise its 'databases'"
        )
    if "without any password configured" in text:
        return AccessRefused(f"{where} has no password configured; remove it from the address")
    _, is_ours, said = text.partition(REFUSED)
    return ServerRefused(f"{where} refused: {said.partition(' script: ')[0] if is_ours else text}")


def is_missing_script(reply: Any) -> bool:
    """The server does not know the script of this digest: it is new, or its scripts were flushed."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(NO_SCRIPT)


def is_wrong_type(reply: Any) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("WRONGTYPE")


def checked(replies: list[Any], address: Address) -> list[Any]:
    """The replies, if none of them is an error."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise error_of(reply, address)
        if isinstance(reply, list) and reply and isinstance(reply[0], hiredis.ReplyError):
            raise error_of(reply[0], address)  # in the reply to EXEC
    return replies


def unreachable(address: Address, problem: OSError, timeout_s: float) -> BrokerUnavailable:
    """Why no connection came about, in one line."""
    where = f"cannot reach Redis at {address.shown}"
    plain, over_tls = address.schemes
    if isinstance(problem, TimeoutError):
        tls = f", and whether the port uses TLS (if not, use {plain})" if address.tls else ""
        return BrokerSilent(f"{where}: no answer within {timeout_s:g} s; check host, port and firewall{tls}")
    if isinstance(problem, ConnectionRefusedError):
        return BrokerUnavailable(f"{where}: connection refused; is it running, and are host and port right?")
    if isinstance(problem, FileNotFoundError):
        return BrokerUnavailable(f"{where}: there is no such socket; is Redis running, and the path right?")
    if isinstance(problem, ConnectionResetError) and not address.tls:
        return BrokerUnavailable(f"{where}: the server closed the connection; for a TLS port use {over_tls}")
    if address.tls and (refused := tls_refusal(where, problem, dict(address.tls_options))) is not None:
        return refused
    if type(problem).__name__ == "gaierror":
        return BrokerUnavailable(f"{where}: the host name is unknown; check its spelling")
    return BrokerUnavailable(f"{where}: {problem.strerror or problem}; check the address")


def silent(address: Address, timeout_s: float) -> BrokerSilent:
    return BrokerSilent(
        f"Redis at {address.shown} did not answer within {timeout_s:g} s; "
        "check the network and the load of the server"
    )


def lost(address: Address) -> BrokerUnavailable:
    return BrokerUnavailable(f"the connection to Redis at {address.shown} was lost; is the server running?")


def not_redis(address: Address) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"the server at {address.shown} does not speak the Redis protocol; check the port"
    )


def handshake(address: Address, *, resp3: bool = False) -> list[tuple[Any, ...]]:
    """What is said first on every connection; `check_greeting` looks at the replies."""
    naming = ("CLIENT", "SETNAME", address.client_name), ("SELECT", address.database)
    hello = ("HELLO", "3") if resp3 else ("HELLO",)
    return [*login(address.username, address.password), *naming, hello]


def check_greeting(replies: list[Any], address: Address) -> None:
    """Whether a server that has answered the handshake is one to work with; else the error that says why."""
    told = checked(replies, address)[-1]
    facts = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
    if facts[b"mode"] == b"cluster":
        raise _in_cluster(address)
    if address.is_sentinel and facts[b"role"] != b"master":
        raise NotPrimary(f"Redis at {address.shown} is a replica for now; a fail-over may be under way")


def _in_cluster(address: Address) -> AccessRefused:
    return AccessRefused(
        f"Redis at {address.shown} is a node of a Redis Cluster, which spreads keys over servers, while "
        "Umbel changes many in one step; use one server, or one with replicas and sentinels (sentinel://)"
    )


def login(username: str, password: str) -> list[tuple[Any, ...]]:
    if not password:
        return []
    return [("AUTH", username, password) if username else ("AUTH", password)]
