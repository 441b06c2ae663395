"""Links: how a broker tells of its connections, and of claims that ended with one.

A worker must know of every connection that was lost and made again, however short that was: what was
broadcast meanwhile is missed, and on RabbitMQ what was claimed on it is the server's again.
"""

from collections.abc import Callable

from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.outage import Closed, LinkChange, LinkLost, LinkRestored
from umbel.wire.control import REQUEST_EXCHANGE

MAIN, MAILBOX, EVENTS = "main", "mailbox", "events"
_SUBSCRIPTIONS = {REQUEST_EXCHANGE: MAILBOX, EVENT_EXCHANGE: EVENTS}


def link_of(exchange: str) -> str:
    """How the link of a subscription is called; empty for those that serve one question."""
    return _SUBSCRIPTIONS.get(exchange, "")


def unheard(change: LinkChange) -> None:
    """Nobody wants to know."""


class LinkWatch:
    """Tells once that a link was lost, and once that it is restored or given up. Nameless, it is silent."""

    def __init__(
        self, name: str, on_link: Callable[[LinkChange], None], *, ends_claims: bool = False
    ) -> None:
        self.is_lost = False
        self._name = name
        self._on_link = on_link
        self._ends_claims = ends_claims

    def lost(self, why: str) -> None:
        if self._name and not self.is_lost:
            self.is_lost = True
            self._on_link(LinkLost(self._name, why, self._ends_claims))

    def restored(self) -> None:
        self._end(LinkRestored)

    def given_up(self) -> None:
        self._end(Closed)

    def _end(self, how: type[LinkRestored] | type[Closed]) -> None:
        if self.is_lost:
            self.is_lost = False
            self._on_link(how(self._name))
