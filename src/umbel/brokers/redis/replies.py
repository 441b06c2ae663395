"""Replies: the handshake, and the errors that a server's error replies stand for, with what to do.

A refused command names the right that the user lacks. For a key or a channel, and inside a script of Redis
7.0, the server only says that a right is missing; then the line of the script names the command, or the
script's error text names the key.

A sentinel is asked for the primary each time a connection is made. Its answer may be out of date: until the
sentinels agree they name the server that is gone, and a sentinel that was cut off names the former primary.
So a server found this way must say that it is the primary (`check_greeting`).
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import hiredis

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.scripts import command_at
from umbel.brokers.tls import tls_refusal
from umbel.errors import (
    AccessRefused,
    BrokerError,
    BrokerRefused,
    BrokerSilent,
    BrokerUnavailable,
    StorageFull,
)
from umbel.files import ran_out

# ---- rights ----------------------------------------------------------------------------------------

# In the words of Redis 6.2 and 7.0, and in those of Redis 7.2 and Valkey.
_COMMAND = re.compile(r"no permissions to run the '([^']+)' command|can't run this command")
_KEY = re.compile(r"access (?:a key|(?:at least )?one of the keys)")
_CHANNEL = re.compile(r"access (?:a channel|(?:at least )?one of the channels)|publish to the channel")
_IN_SCRIPT = re.compile(r"script: ([0-9a-f]{40}), on @user_script:(\d+)")
_USED = re.compile(r"the key '(.*)' cannot be used(?: by ([A-Z]+))?: ")
_ALL = "grant what docs/brokers.md lists; ACL LOG on the server says which"


@dataclass(frozen=True, slots=True)
class MissingRight:
    """The right and how to grant it, as text; `is_key`: it concerns one key only."""

    words: str
    is_key: bool = False


def missing_right(text: str, user: str) -> MissingRight | None:
    """The right that the user lacks; None if this is another error."""
    used = _USED.search(text)
    key, by = (used[1], (used[2] or "").lower()) if used else ("", "")
    if found := _COMMAND.search(text):
        place = _IN_SCRIPT.search(text)
        command = found[1] or by or (command_at(place[1], int(place[2])) if place else "")
        if not command:
            return MissingRight(f"a command that a script needs to the user {user!r}; {_ALL}")
        return _missing(f"the command {command!r}", user, f"+{command}")
    if _KEY.search(text):
        return _missing(f"the key {key!r}" if key else "a key", user, f"~{key or '*'}", is_key=True)
    return _missing("a channel", user, "&*") if _CHANNEL.search(text) else None


def _missing(what: str, user: str, right: str, *, is_key: bool = False) -> MissingRight:
    remedy = f"grant it with ACL SETUSER {user} {right}, or all that docs/brokers.md lists"
    return MissingRight(f"{what} to the user {user!r}; {remedy}", is_key)


# ---- errors ----------------------------------------------------------------------------------------

NO_SCRIPT = "NOSCRIPT"
REFUSED = "REFUSED "  # how the scripts begin their own error texts


class ServerRefused(BrokerRefused):
    """An error reply that is about the command, not about the server's state."""


class NotPrimary(BrokerUnavailable):
    """The server is a replica; the primary must be looked up again."""


def error_of(reply: hiredis.ReplyError, address: Address) -> BrokerError:
    """The error that an error reply stands for, with what to do."""
    text = str(reply)
    code = text.partition(" ")[0]
    where = f"Redis at {address.shown}"
    if (right := missing_right(text, address.username or "default")) is not None:
        # A key concerns one queue or result, other rights concern everything.
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
    _, is_ours, explanation = text.partition(REFUSED)
    return ServerRefused(f"{where} refused: {explanation.partition(' script: ')[0] if is_ours else text}")


def is_missing_script(reply: Any) -> bool:
    """Whether the server does not know the script: it is a new server, or its scripts were flushed."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(NO_SCRIPT)


def is_wrong_type(reply: Any) -> bool:
    """Whether the reply says that a key has another type."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("WRONGTYPE")


def checked(replies: list[Any], address: Address) -> list[Any]:
    """The replies; raises the first error among them."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise error_of(reply, address)
        if isinstance(reply, list) and reply and isinstance(reply[0], hiredis.ReplyError):
            raise error_of(reply[0], address)  # in the reply to EXEC
    return replies


def unreachable(address: Address, problem: OSError, timeout_s: float) -> BrokerUnavailable:
    """The error for a connection that could not be made, with the reason in one line."""
    where = f"cannot reach Redis at {address.shown}"
    if no_files := ran_out(problem):
        return BrokerUnavailable(f"{where}: {no_files}")
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
    """The error for a reply that did not come in time."""
    return BrokerSilent(
        f"Redis at {address.shown} did not answer within {timeout_s:g} s; "
        "check the network and the load of the server"
    )


def lost(address: Address) -> BrokerUnavailable:
    """The error for a connection that ended before the reply."""
    return BrokerUnavailable(f"the connection to Redis at {address.shown} was lost; is the server running?")


def not_redis(address: Address) -> BrokerUnavailable:
    """The error for a server that does not speak the Redis protocol."""
    return BrokerUnavailable(
        f"the server at {address.shown} does not speak the Redis protocol; check the port"
    )


def time_of(reply: list[bytes]) -> float:
    """The Unix time in the reply to TIME."""
    seconds, microseconds = reply
    return int(seconds) + int(microseconds) / 1e6


# ---- handshake -------------------------------------------------------------------------------------


def handshake(address: Address, *, resp3: bool = False) -> list[tuple[Any, ...]]:
    """The first commands on every connection; `check_greeting` checks the replies."""
    naming = ("CLIENT", "SETNAME", address.client_name), ("SELECT", address.database)
    hello = ("HELLO", "3") if resp3 else ("HELLO",)
    return [*login(address.username, address.password), *naming, hello]


def check_greeting(replies: list[Any], address: Address) -> None:
    """Raise an error if the server that answered the handshake cannot be used: a cluster node, or a
    replica.
    """
    greeting = checked(replies, address)[-1]
    facts = greeting if isinstance(greeting, dict) else dict(zip(greeting[::2], greeting[1::2], strict=True))
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
    """The command that logs in, or none without a password."""
    if not password:
        return []
    return [("AUTH", username, password) if username else ("AUTH", password)]


def sentinel_commands(address: Address) -> list[tuple[Any, ...]]:
    """The commands for the sentinel; the last reply names the primary."""
    asked = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.master)
    return [*login(*address.sentinel_login), asked]


def primary_from(replies: list[Any], address: Address) -> Address:
    """The server that the sentinel names; AccessRefused or BrokerUnavailable if it names none."""
    try:
        named = checked(replies, address)[-1]
    except AccessRefused:
        raise AccessRefused(
            f"the sentinel at {address.host}:{address.port} refuses the login or the question; its user and "
            "password are sentinel_username and sentinel_password in the address"
        ) from None
    if not named:
        raise BrokerUnavailable(
            f"the sentinel at {address.host}:{address.port} knows no master called {address.master!r}; "
            "check master_name in the address"
        )
    host, port = named
    return replace(address, host=host.decode(), port=int(port), master="")
