"""Links and listeners: what all brokers share about connections that are lost.

`ConfiguredBroker` has the settings, the listeners and the signer of a broker. `LinkWatch` reports each
connection that is lost, restored or given up. A worker must know of every one, however short the outage was:
broadcasts sent meanwhile are missed, and on RabbitMQ the claims made on that connection go back to the
server. `LastingSubscription` is the loop of a listener through lost connections.

The id of the cluster is never made here. It is stored by a command, or by a worker whose settings name it. A
broker that lost its id would otherwise get a new one, and refuse every signed message that waits there.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from umbel.backoff import Backoff
from umbel.brokers.interface import Broadcast, BrokerSettings, ClusterRecord, Replaced
from umbel.clock import cluster_now
from umbel.errors import BrokerError, ConfigurationError, NoClusterId
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.delivery.trust import ClusterId
from umbel.protocol.shutdown import Closed, LinkChange, LinkLost, LinkRestored
from umbel.text import without_password
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.signing import Keyring, Signer

# ---- links -----------------------------------------------------------------------------------------

MAIN, MAILBOX, EVENTS = "main", "mailbox", "events"
_SUBSCRIPTIONS = {REQUEST_EXCHANGE: MAILBOX, EVENT_EXCHANGE: EVENTS}


def link_of(exchange: str) -> str:
    """Return the name of a subscription's link; empty for subscriptions that serve one request."""
    return _SUBSCRIPTIONS.get(exchange, "")


def ignore_link(change: LinkChange) -> None:
    """Ignore a change of a link: the listener until a real one is set."""


class LinkWatch:
    """Reports once that a link was lost, and once that it was restored or given up. Without a name it reports
    nothing.
    """

    def __init__(
        self, name: str, on_link: Callable[[LinkChange], None], *, ends_claims: bool = False
    ) -> None:
        self.is_lost = False
        self._name = name
        self._on_link = on_link
        self._ends_claims = ends_claims

    def lost(self, why: str) -> None:
        """Report the loss and its reason, unless it is reported already."""
        if self._name and not self.is_lost:
            self.is_lost = True
            self._on_link(LinkLost(self._name, why, self._ends_claims))

    def restored(self) -> None:
        """Report that a lost link works again."""
        self._end(LinkRestored)

    def given_up(self) -> None:
        """Report that a lost link was closed and will not be restored."""
        self._end(Closed)

    def _end(self, how: type[LinkRestored] | type[Closed]) -> None:
        if self.is_lost:
            self.is_lost = False
            self._on_link(how(self._name))


class LastingSubscription:
    """Base of subscriptions that reconnect: the loop of a listener through lost connections.

    Broadcasts that are sent while the connection is lost are missed.
    """

    def __init__(self) -> None:
        self.arrived = asyncio.Event()  # set when a broadcast arrives, and when the connection is lost

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        backoff = Backoff()
        while True:
            while (broadcast := self.next_broadcast()) is not None:
                yield broadcast
            self.arrived.clear()
            try:
                await self.wait_or_reconnect()
                backoff.reset()
            except BrokerError:
                await backoff.pause()

    def next_broadcast(self) -> Broadcast | None:
        """Return the next broadcast that has arrived, if any."""
        raise NotImplementedError

    async def wait_or_reconnect(self) -> None:
        """Wait for a broadcast for some time, or reconnect; raise BrokerError if that fails."""
        raise NotImplementedError

    async def has_arrived(self, timeout_s: float) -> bool:
        """Whether a broadcast or a loss arrives in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.arrived.wait()
        except TimeoutError:
            return False


# ---- configured broker -----------------------------------------------------------------------------


class ConfiguredBroker:
    """Base of all brokers: the settings, the two listeners, and the signer found at `open`."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._on_link: Callable[[LinkChange], None] = ignore_link
        self._on_replaced: Callable[[Replaced], None] = lambda _: None
        self._signer: Signer | None = None

    @property
    def url(self) -> str:
        """The address from the settings."""
        return self._settings.url

    @property
    def keyring(self) -> Keyring | None:
        """The keys that messages over this broker are signed with, if any."""
        return self._settings.keyring

    @property
    def revoke_retention_s(self) -> float:
        """How long a revoke that is recorded now holds."""
        return self._settings.revoke_retention_s

    @property
    def signer(self) -> Signer | None:
        """The keys and the cluster they sign for; NoClusterId if there are keys and no cluster id."""
        if self._signer is None and self.keyring is not None:
            raise NoClusterId.at(without_password(self.url))
        return self._signer

    @property
    def _signs_for(self) -> str:
        """The cluster whose signatures are used here; "": signatures are not compared."""
        return "" if self._signer is None else self._signer.cluster.id

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Set the listener for links that are lost, restored or given up."""
        self._on_link = callback

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        """Set the listener for data of the broker that was replaced."""
        self._on_replaced = callback

    def _tell_link(self, change: LinkChange) -> None:
        self._on_link(change)

    def _tell_replaced(self, replaced: Replaced) -> None:
        self._on_replaced(replaced)


async def signer_at(broker: ClusterRecord, settings: BrokerSettings) -> Signer | None:
    """Return the signer for a broker that was just opened, or None.

    A worker stores the cluster id that its settings name, and raises NoClusterId if there is none.
    """
    keyring, named = settings.keyring, settings.signing_cluster
    if keyring is None:
        return None
    found = await broker.cluster_id() if broker.capabilities.signatures else None
    if found is None and named:
        found = ClusterId(named)
        if settings.remembers_signatures:
            found = await broker.keep_cluster_id(ClusterId(named, cluster_now()))
    if found is None:
        if settings.remembers_signatures:
            raise NoClusterId.at(without_password(settings.url))
        return None
    if named not in ("", found.id):
        raise ConfigurationError(
            f"'signing_cluster' is {named!r}, but the broker {without_password(settings.url)} belongs to the "
            f"cluster {found.id!r}; correct the setting, or the address"
        )
    return Signer(keyring, found)


# ---- owners ----------------------------------------------------------------------------------------
#
# The workers that claim messages through this process, and whose turn each queue is.
#
# RabbitMQ and Pub/Sub share it: there the server's lease belongs to the process, and this process ends the
# claims of an owner that is silent for too long.

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Owner:
    """A worker that claims messages, and when its lease ends."""

    def __init__(self, name: str, ends: float) -> None:
        self.name = name
        self.ends = ends
        self.turn = -1  # the place of the queue that was served last
        self.is_new = True  # its lease is new, which was not reported to the owner yet

    def had_lease(self) -> bool:
        """Whether the lease was in force since the last call: a loss is reported once."""
        had, self.is_new = not self.is_new, False
        return had


class Buffer(Protocol[T_co]):
    """The messages of one queue that wait in this process to be claimed."""

    def take(self, priority: int, limit: int) -> Sequence[T_co]:
        """Take up to `limit` messages of this priority."""


def next_in_turn(owner: Owner, buffers: Sequence[Buffer[T]], priority: int) -> tuple[int, T] | None:
    """Take a message from the first buffer that has one, starting after the one served last.

    Returns the buffer's place too; None if all are empty.
    """
    for turn in range(owner.turn + 1, owner.turn + 1 + len(buffers)):
        place = turn % len(buffers)
        for taken in buffers[place].take(priority, 1):
            owner.turn = place
            return place, taken
    return None
