"""Look: what is left to do in the broker's file, without claiming any of it. For tests that run a worker."""

from collections.abc import Collection

from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite import messages
from umbel.brokers.sqlite.store import Store


class Look:
    """One connection of its own; to be used in one thread."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)

    def left(self, queues: Collection[str]) -> int:
        """How many messages of these queues are due or claimed.

        A worker removes a message in the transaction that inserts what follows from it: 0 says that
        nothing more comes by itself before the next delayed message is due.
        """
        with self._store.database.read() as db:
            depths = messages.depths(db)
            due = messages.next_due(db)
        left = sum(ready + claimed for name, (ready, _, claimed, _) in depths.items() if name in queues)
        return left or int(due is not None and due <= self._store.clock.wall_s())

    def next_due(self) -> float | None:
        """When the first delayed message is due, in Unix time."""
        with self._store.database.read() as db:
            return messages.next_due(db)

    def close(self) -> None:
        self._store.close()
