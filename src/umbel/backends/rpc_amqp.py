"""AmqpPost: results over RabbitMQ, in a queue that is deleted with its client (wire 6.3).

The queue is declared again after a lost connection. Results that are sent meanwhile are lost.
"""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from umbel.brokers.amqp import publishing, topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.envelope import decode_properties
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import Addresses, Location, locations_from_url
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BadURL
from umbel.wire.message import StoredResult


class AmqpPost:
    """Sends and receives results over RabbitMQ."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._addresses = Addresses(url)
        self._timeout_s = settings.connect_timeout_s
        self._producer = AmqpProducer(replace(settings, url=url))

    def is_at(self, broker_url: str) -> bool:
        """Whether this broker address names the same locations."""
        try:
            return locations_from_url(broker_url) == self._addresses.locations
        except BadURL:
            return False

    def send(self, results: Sequence[StoredResult]) -> None:
        """Publish each result to its reply queue."""
        self._producer.send([publishing.result(result, result.reply_to) for result in results])

    def open(self, address: str) -> "AmqpInbox":
        """Declare the reply queue and consume from it."""
        return self._addresses.connect(lambda location: self._open_at(location, address))

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()

    def _open_at(self, location: Location, address: str) -> "AmqpInbox":
        link = BlockingLink(location, timeout_s=self._timeout_s, name=f"umbel results {os.getpid()}")
        try:
            for method, fields in topology.result_queue(address).calls():
                link.call(method, *fields)
            link.call(Method.BASIC_CONSUME, 0, address, "r", False, True, False, False, {})
        except BaseException:
            link.abandon()
            raise
        return AmqpInbox(link)


class AmqpInbox:
    """A connection that consumes from one reply queue."""

    def __init__(self, link: BlockingLink) -> None:
        self._link = link

    def receive(self) -> list[tuple[str, bytes]]:
        """Block until results arrive."""
        self._link.receive(None)
        arrived, self._link.deliveries = self._link.deliveries, []
        return [
            (decode_properties(delivery.properties).correlation_id, delivery.body) for delivery in arrived
        ]

    def interrupt(self) -> None:
        """Make `receive` end with an error."""
        self._link.interrupt()

    def close(self) -> None:
        """Close the socket without a goodbye."""
        self._link.abandon()
