"""The scripts as the server runs them: each is called by what its first lines promise, with a prefix.

Quicker than by way of a broker, and everything can be said: what is asked, what is answered, what lies
in the data before and after.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.servers.redis import RedisServer
from umbel.brokers.interface.connection import DEFAULT_SEP as SEP
from umbel.brokers.redis.scripts import script

PREFIX = "P:"
ADA, BOB = "ada", "bob"
HOUR_S = 3600.0
LEASE_S = 30.0
EPOCH = "n.1"


def marked(body: str, **mark: object) -> bytes:
    """An envelope with our mark in front, as `messages.lua` writes it."""
    return ('{"umbel": ' + json.dumps(mark) + ', "body": "' + body + '"}').encode()


def at_step(queue: str, step: int) -> str:
    return f"{queue}{SEP}{step}" if step else queue


class Scripts:
    """Keys are named without the prefix, which stands before every one of them."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def run(self, name: str, *args: object) -> Any:
        return self._server.ask(
            "EVAL", script(name, prefix=PREFIX).text, 0, *(_argument(one) for one in args)
        )

    def evaluate(self, text: str, *args: object) -> Any:
        return self._server.ask("EVAL", text, 0, *(_argument(one) for one in args))

    def ask(self, command: str, key: str = "", *args: object) -> Any:
        return self._server.ask(command, PREFIX + key, *(_argument(one) for one in args))

    def keys(self) -> set[str]:
        found = self._server.ask("KEYS", "*")
        assert isinstance(found, list)
        return {key.decode() for key in found}

    @property
    def now(self) -> float:
        found = self._server.ask("TIME")
        assert isinstance(found, list)
        return int(found[0]) + int(found[1]) / 1e6

    # -- what lies there, and what is put there ----------------------------------------------------

    def fill(self, queue: str, *envelopes: str | bytes) -> None:
        """The first is the oldest."""
        self.ask("LPUSH", queue, *envelopes)

    def waiting(self, queue: str) -> list[bytes]:
        """The first is the next to be taken."""
        found: list[bytes] = self.ask("LRANGE", queue, 0, -1)
        return found[::-1]

    def delayed(self, queue: str) -> list[tuple[bytes, float]]:
        flat = self.ask("ZRANGE", f"umbel.delayed.{queue}", 0, -1, "WITHSCORES")
        return [(member, float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]

    def delay(self, queue: str, due: float, member: str | bytes) -> None:
        self.ask("ZADD", f"umbel.delayed.{queue}", f"{due:.6f}", member)

    def held(self, owner: str = ADA) -> Mapping[bytes, bytes]:
        flat = self.ask("HGETALL", f"umbel.inflight.{owner}")
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def hold(self, owner: str = ADA, **fields: str | bytes) -> None:
        """Fields by place: `_1` is the first that claim 1 took from the queue "q"."""
        flat = [part for place, text in fields.items() for part in (f"{EPOCH}:{place[1:]}:{PREFIX}q", text)]
        self.ask("HSET", f"umbel.inflight.{owner}", "epoch", EPOCH, *flat)

    def hand(self, owner: str, queue: str, *envelopes: str | bytes) -> None:
        self.ask("HSET", "umbel.handing", owner, PREFIX + queue)
        for one in envelopes:
            self.ask("LPUSH", f"umbel.handed.{owner}", one)

    def lease_of(self, owner: str) -> float | None:
        found = self.ask("ZSCORE", "umbel.owners", owner)
        return None if found is None else float(found)

    def letters(self) -> list[dict[str, str]]:
        """The dead letters, oldest first."""
        found = []
        for _, flat in self.ask("XRANGE", "umbel.dead", "-", "+"):
            words = [one.decode() for one in flat]
            found.append(dict(zip(words[::2], words[1::2], strict=True)))
        return found

    # -- the longer calls ----------------------------------------------------------------------------

    def claim(
        self,
        *queues: str,
        limit: int = 10,
        ticket: str = EPOCH,
        generation: int = 1,
        after: int = 0,
        page: int = 100,
        owner: str = ADA,
        lease: float = LEASE_S,
        apart: bool = False,
        most_bytes: int = 10**9,
    ) -> "ClaimReply":
        sizes = (int(apart), most_bytes, most_bytes)
        args = (owner, lease, ticket, generation, limit, after, page, *sizes, *(queues or ("q",)))
        return ClaimReply(self.run("claim", *args))

    def owners(self, verb: str, owner: str = "", *, lease: float = LEASE_S, known: int = 0) -> Any:
        """Of a renewal without its last part, the server's time."""
        reply = self.run("owners", verb, lease, owner, known)
        return reply[:-1] if verb == "renew" else reply


class ClaimReply:
    def __init__(self, reply: Sequence[Any]) -> None:
        self.epoch, self.now, self.cursor, self.revokes, self.complete, self.broken, *self.taken = reply

    @property
    def envelopes(self) -> list[bytes]:
        groups = zip(self.taken[2::4], self.taken[3::4], strict=True)
        return [envelope for sign, group in groups if sign != b"!" for envelope in group]

    @property
    def aside(self) -> list[tuple[bytes, int]]:
        """The lists and sizes of messages that are dead letters now."""
        groups = zip(self.taken[::4], self.taken[1::4], self.taken[2::4], strict=True)
        return [(list_key, size) for list_key, size, sign in groups if sign == b"!"]


def _argument(value: object) -> str | bytes | int:
    return value if isinstance(value, str | bytes | int) else str(value)
