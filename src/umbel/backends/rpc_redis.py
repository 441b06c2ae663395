"""RedisPost: results over Redis, in a list that outlives its client's connection (wire 6.3).

The client waits for the list without removing anything, reads the results, and then trims the list. So a
broken connection loses nothing: results that were not trimmed are read again. A list without a reader expires
with the retention of results.
"""

from collections.abc import Sequence

from umbel.brokers.interface import BrokerSettings
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.publishing import push_results
from umbel.brokers.redis.replies import checked
from umbel.brokers.redis.sockets import SocketConnection, SocketPool
from umbel.brokers.redis.verdicts import ttl_ms_of
from umbel.errors import BadURL, BrokerRefused
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import StoredResult

READ_AT_ONCE = 1000
WAITS_PER_TIMEOUT = 2  # a wait ends before the socket's time-out, and is repeated


class RedisPost:
    """Sends and receives results over Redis."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._addresses = parse_addresses(url)
        self._keys = Keys.of(settings, self._addresses[0].database)
        self._ttl_ms = ttl_ms_of(settings.result_expires_s)
        self._timeout_s = settings.connect_timeout_s
        self._tries = 0
        self._pool = SocketPool(self._addresses, timeout_s=settings.connect_timeout_s)

    def is_at(self, broker_url: str) -> bool:
        """Whether this broker address names the same servers and database."""
        try:
            theirs = parse_addresses(broker_url)
        except BadURL:
            return False
        return [address.place for address in theirs] == [address.place for address in self._addresses]

    def send(self, results: Sequence[StoredResult]) -> None:
        """Push each result to its reply list; BrokerRefused names the refused ones."""
        commands = push_results(self._keys, results, self._ttl_ms)
        self._pool.use(lambda connection: _send(connection, commands, len(results)))

    def open(self, address: str) -> "RedisInbox":
        """Open an inbox on the next server: this is called again when one has failed."""
        server = self._addresses[self._tries % len(self._addresses)]
        self._tries += 1
        connection = SocketConnection(server, timeout_s=self._timeout_s)
        wait_s = self._timeout_s / WAITS_PER_TIMEOUT
        return RedisInbox(connection, self._keys.list_of(address, 0), self._ttl_ms, wait_s=wait_s)

    def close(self) -> None:
        """Close all pooled connections."""
        self._pool.close()


class RedisInbox:
    """A connection that reads one reply list."""

    def __init__(self, connection: SocketConnection, key: str, ttl_ms: int, *, wait_s: float) -> None:
        self._connection = connection
        self._key = key
        self._ttl_ms = ttl_ms
        self._wait_s = wait_s
        self._received = 0  # entries at the tail of the list, to be trimmed

    def receive(self) -> list[tuple[str, bytes]]:
        """Trim the results received before, then block until more arrive."""
        connection, key = self._connection, self._key
        while True:
            commands: list[Sequence[object]] = []
            if self._received:
                commands.append(("LTRIM", key, 0, -self._received - 1))
            if self._ttl_ms:
                commands.append(("PEXPIRE", key, self._ttl_ms))
            commands.append(("BLMOVE", key, key, "RIGHT", "RIGHT", self._wait_s))
            connection.call_all(commands)
            self._received = 0
            found = connection.call("LRANGE", key, -READ_AT_ONCE, -1)
            if found:
                self._received = len(found)
                opened = [unseal(envelope).message for envelope in reversed(found)]
                return [(message.correlation_id, message.body) for message in opened]

    def interrupt(self) -> None:
        """Make `receive` end with an error."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _send(connection: SocketConnection, commands: Sequence[Sequence[object]], count: int) -> None:
    """Run the commands. A list may refuse its result; the others are sent, and BrokerRefused names the
    refused one.
    """
    refused: dict[int, str] = {}
    for at, reply in enumerate(connection.exchange(commands)):
        try:
            checked([reply], connection.address)
        except BrokerRefused as problem:
            refused[at * count // len(commands)] = str(problem)
    if refused:
        raise BrokerRefused(
            f"a result cannot be sent: {next(iter(refused.values()))}", places=sorted(refused)
        )
