"""Handshake: how a connection opens.

Pure: methods of channel 0 in, bytes to send out. The first flight is PROTOCOL_HEADER.
"""

from umbel.brokers.amqp.frames import FRAME_MAX, Incoming, Method, encode_method
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import connection_refusal
from umbel.errors import BrokerUnavailable
from umbel.version import VERSION

CHANNELS_MAX = 2047
REPLY_TIMEOUT_S = 10.0  # for every answer after the handshake
CONFIRMS_PER_S = 1000  # a slow server; a large batch may take it that much longer


def confirm_timeout_s(messages: int) -> float:
    return REPLY_TIMEOUT_S + messages / CONFIRMS_PER_S


# What the server may do with us: say why a login failed, name the queue whose consumer it ended.
_CAPABILITIES = {
    "publisher_confirms": True,
    "consumer_cancel_notify": True,
    "basic.nack": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


class Handshake:
    def __init__(self, location: Location, *, heartbeat_s: int, name: str) -> None:
        self._location = location
        self._name = name
        self.heartbeat_s = heartbeat_s
        self._done = False

    def is_done(self) -> bool:
        return self._done

    def step(self, incoming: Incoming) -> bytes:
        match incoming.method:
            case Method.CONNECTION_START:
                return self._start_ok()
            case Method.CONNECTION_TUNE:
                return self._tune(*incoming.fields)
            case Method.CONNECTION_OPEN_OK:
                self._done = True
                return b""
            case Method.CONNECTION_CLOSE:
                code, text, _, _ = incoming.fields
                raise connection_refusal(self._location, code, text)
            case _:
                raise BrokerUnavailable(
                    f"RabbitMQ at {self._location} did not start an AMQP handshake; is this its AMQP port?"
                )

    def _start_ok(self) -> bytes:
        properties = {
            "product": "umbel",
            "version": VERSION,
            "platform": "Python",
            "connection_name": self._name,
            "capabilities": _CAPABILITIES,
        }
        login = f"\0{self._location.user}\0{self._location.password}"
        return encode_method(0, Method.CONNECTION_START_OK, properties, "PLAIN", login, "en_US")

    def _tune(self, channels_max: int, frame_max: int, heartbeat_s: int) -> bytes:
        if heartbeat_s:
            self.heartbeat_s = min(self.heartbeat_s, heartbeat_s)
        if 0 < frame_max < FRAME_MAX:
            raise BrokerUnavailable(
                f"RabbitMQ at {self._location} allows frames of {frame_max} bytes: "
                f"set frame_max = {FRAME_MAX} in rabbitmq.conf"
            )
        channels_max = min(channels_max, CHANNELS_MAX) or CHANNELS_MAX
        return encode_method(
            0, Method.CONNECTION_TUNE_OK, channels_max, FRAME_MAX, self.heartbeat_s
        ) + encode_method(0, Method.CONNECTION_OPEN, self._location.vhost, "", False)
