"""LoopLinks: one connection for all of an event loop's clients that speak to one Redis server.

Who sends and who waits for results holds the same link while there is need for it; the last one that lets
go closes it. A link belongs to its loop: another loop, in whatever thread, has another one. Links of loops
that were closed are forgotten by `abandon`, or when the next link is asked for.
"""

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.link import Link

_Place = tuple[tuple[Address, ...], float]
_links: dict[asyncio.AbstractEventLoop, dict[_Place, "LoopLink"]] = {}
_changing = Lock()


class LoopLink:
    """Use `hold`. What the server pushes, and that the connection was lost, is told to all who listen."""

    def __init__(self, addresses: Sequence[Address], timeout_s: float) -> None:
        self.link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            resp3=True,
            gathers=True,
            on_push=self._pushed,
            on_lost=self._lost,
        )
        self.holders = 0
        self.on_push: list[Callable[[list[Any]], None]] = []
        self.on_lost: list[Callable[[], None]] = []

    def _pushed(self, pushed: list[Any]) -> None:
        for tell in self.on_push:
            tell(pushed)

    def _lost(self) -> None:
        for tell in self.on_lost:
            tell()


def hold(addresses: Sequence[Address], *, timeout_s: float) -> LoopLink:
    """The running loop's link to these servers; `release` it in the same loop."""
    loop = asyncio.get_running_loop()
    with _changing:
        _forget_closed()
        places = _links.setdefault(loop, {})
        place = (tuple(addresses), timeout_s)
        if place not in places:
            places[place] = LoopLink(addresses, timeout_s)
        places[place].holders += 1
        return places[place]


def abandon() -> None:
    """Forget the links of loops that were closed."""
    with _changing:
        _forget_closed()


def _forget_closed() -> None:
    for loop in [one for one in _links if one.is_closed()]:
        del _links[loop]


def release(held: LoopLink) -> None:
    with _changing:
        held.holders -= 1
        if held.holders:
            return
        loop = asyncio.get_running_loop()
        places = {place: one for place, one in _links.get(loop, {}).items() if one is not held}
        if places:
            _links[loop] = places
        else:
            _links.pop(loop, None)
    held.link.close()
