"""Message: one call on its way, in the form that every broker carries.

Headers and body stay bytes here, because most of those who touch a message only pass it on:
the worker's main process reads a few headers, only the child decodes the body. A broker turns
this record into its own envelope and back, and may not change a byte of headers or body. What is
no message at all travels as `unreadable`, so that the worker buries it with a reason.
"""

import msgspec

from umbel.wire.limits import ExpirationMs, Name, Priority

JSON_CONTENT = "application/json"


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    headers: bytes  # one JSON object
    body: bytes  # as serialised, and compressed when a header says so
    content_type: str = JSON_CONTENT
    content_encoding: str = "utf-8"
    priority: Priority = 0
    correlation_id: Name = ""
    reply_to: Name = ""
    expiration_ms: ExpirationMs | None = None  # how long the broker should keep it, counted from publishing
    properties: bytes = b""  # the sender's other properties as one JSON object; see `wire/properties.py`
    exchange: str = ""  # it came by, with its routing key; empty: straight to its queue
    routing_key: str = ""


UNREADABLE_CONTENT = "application/data"


def unreadable(data: bytes) -> Message:
    """Bytes from a queue that are no message: nothing is known of them."""
    return Message(b"", data, UNREADABLE_CONTENT, "binary")


class Outgoing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message and where it goes. `not_before` is Unix time; 0 means at once.

    `redelivered`: it is sent again, and may have run before. With an `exchange` it goes to every queue that
    is bound there for its routing key; the queue it names is then for people alone.
    """

    queue: str
    message: Message
    not_before: float = 0.0
    redelivered: bool = False
    exchange: str = ""
    routing_key: str = ""

    @property
    def target(self) -> str:
        """Where it goes, for people."""
        return f"{self.exchange}/{self.routing_key}" if self.exchange else self.queue

    def as_letter(self) -> "Outgoing":
        """As it is kept when nobody takes it: one for an exchange remembers that, and names no queue."""
        if not self.exchange:
            return self
        routed = msgspec.structs.replace(self.message, exchange=self.exchange, routing_key=self.routing_key)
        return Outgoing("", routed)


def outgoing_of_letter(queue: str, message: Message) -> Outgoing:
    """A dead letter as it is sent once more."""
    if queue or not message.exchange:
        return Outgoing(queue, message)
    return Outgoing("", message, exchange=message.exchange, routing_key=message.routing_key)


class StoredResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a result backend keeps for one task: the result map of the wire protocol, encoded.

    With `reply_to` it is sent to that queue instead (rpc), and kept by the client that waits there.
    """

    task_id: str
    status: str
    payload: bytes  # JSON: status, result, traceback, children, date_done, task_id, ...
    reply_to: str = ""
