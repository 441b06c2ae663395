"""AmqpPost: results over RabbitMQ, in a queue that goes with its client (wire 6.3).

The queue is made again after a lost connection, and what was sent meanwhile is lost.
"""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.location import locations_from_url
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.properties import decode_properties
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BadURL
from umbel.wire.message import StoredResult


class AmqpPost:
    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._locations = locations_from_url(url)
        self._timeout_s = settings.connect_timeout_s
        self._producer = AmqpProducer(replace(settings, url=url))

    def is_at(self, broker_url: str) -> bool:
        try:
            return locations_from_url(broker_url) == self._locations
        except BadURL:
            return False

    def send(self, results: Sequence[StoredResult]) -> None:
        self._producer.send([outbox.result(result, result.reply_to) for result in results])

    def open(self, address: str) -> "AmqpInbox":
        link = BlockingLink(
            self._locations[0], timeout_s=self._timeout_s, name=f"umbel results {os.getpid()}"
        )
        try:
            for method, fields in topology.result_queue(address).calls():
                link.call(method, *fields)
            link.call(Method.BASIC_CONSUME, 0, address, "r", False, True, False, False, {})
        except BaseException:
            link.abandon()
            raise
        return AmqpInbox(link)

    def close(self) -> None:
        self._producer.close()


class AmqpInbox:
    def __init__(self, link: BlockingLink) -> None:
        self._link = link

    def receive(self) -> list[tuple[str, bytes]]:
        self._link.receive(None)
        arrived, self._link.deliveries = self._link.deliveries, []
        return [(decode_properties(one.properties).correlation_id, one.body) for one in arrived]

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.abandon()
