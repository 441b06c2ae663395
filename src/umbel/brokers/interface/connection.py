"""BrokerConnection: the connection of one process to its broker, and the lease that lives on it."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from umbel.brokers.transport import Capabilities
from umbel.protocol.outage import LinkChange
from umbel.wire.signing import Keyring


class Replaced(msgspec.Struct, frozen=True):
    """The broker's data is not what it was: emptied, deleted, or restored from a backup.

    `unknown`: how many messages were claimed here that it does not know as claimed any more.
    """

    what: str
    unknown: int


class BrokerInfo(Protocol):
    """What every part of a broker says of the whole."""

    @property
    def url(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def keyring(self) -> Keyring | None: ...


class BrokerConnection(BrokerInfo, Protocol):
    """Opens, closes and restores the connection; keeps the owner's lease; removes what is too old.

    It has one listener for its links and one for its data; both are called on the loop.
    """

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Tell of each link that is lost, restored, or lost and given up."""
        ...

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        """Tell when the broker notices that its data was replaced.

        It has then made again what it needs itself: queues, the owner's lease, subscriptions follow within
        seconds.
        """
        ...

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def reconnect(self) -> None:
        """Try once to restore the links that were lost; subscriptions restore themselves."""
        ...

    async def renew(self, owner: str) -> bool:
        """Prolong the owner's lease, or begin one. False: there was none any more.

        A lease ends when somebody takes the messages of an owner whose time is over; an owner
        that comes late but before that has lost nothing. An owner that claims first learns of it then.
        """
        ...

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the messages of owners whose lease ended, marked redelivered; how many.

        `by_turn`: called by every worker again and again. What else is tidied up on the way is then left to
        one of them, where all would find the same.
        """
        ...

    async def forget_owner(self, owner: str) -> int:
        """The owner stops: return at once what it still holds, marked redelivered; how many.

        What certainly did not run is better settled with `Return` before.
        """
        ...

    async def sweep(self) -> None:
        """Remove what is past its retention: results, broadcasts, events, revokes."""
        ...
