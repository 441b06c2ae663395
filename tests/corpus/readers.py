"""The readers of the wire, by what they read: bytes in, a typed value or a WireError out (N1).

Each takes what a stranger chose and goes as far as the worker, or the client, goes with it in the
process that must not end. The corpus and the fuzzers call the same ones.
"""

from collections.abc import Callable
from typing import Any

from tests.corpus.case import Case
from tests.corpus.delivering import amqp_properties, redis_envelope, sqlite_row
from umbel.app.results import rebuild_exception
from umbel.brokers.amqp import envelope as amqp_envelope
from umbel.brokers.amqp.frames import BadFrames, Incoming
from umbel.brokers.amqp.frames import FrameReader as AmqpFrameReader
from umbel.brokers.interface import Delivery
from umbel.brokers.sqlite import messages as sqlite_messages
from umbel.errors import WireError
from umbel.pools.prefork.messages import FromChild, FromServer, ToChild
from umbel.protocol.delivery.delivery import Admit, TaskRules
from umbel.wire.call import decode_task, read_headers
from umbel.wire.control import decode_reply, decode_request
from umbel.wire.coordination import read_worker_event
from umbel.wire.envelope_redis import unseal
from umbel.wire.event import decode_events
from umbel.wire.frames import FrameReader, JobBatch, encode_frame
from umbel.wire.message import Message
from umbel.wire.result import decode_result
from umbel.wire.task import to_v2
from umbel.worker.delivery.admit import arrival_of, job_of, let_run
from umbel.worker.delivery.claimed import Claimed

REFUSALS = (WireError, BadFrames)
_RUN = Admit(TaskRules())


def read_message(message: Message) -> object:
    """As far as the main process goes, down to the frame for the child; then what the child does."""
    opened = to_v2(message)
    headers = read_headers(opened)
    delivery = Delivery("1:1", "celery", message)
    held = Claimed(1, delivery, opened, headers, arrival_of(delivery, headers))
    let_run(held, _RUN)
    encode_frame(JobBatch(1, [job_of(held)]))
    return decode_task(opened)


def read_case(case: Case, broker: str) -> object:
    match case.kind:
        case "task" | "envelope" if not case.to:
            return read_message(_message_of(case, broker))
        case "event":
            return read_event(case.body)
        case "control":
            return decode_request(case.headers, case.body)
        case "reply":
            return decode_reply(case.headers, case.body)
        case "result":
            return read_result(case.raw or b"")
        case "frame":
            return read_frame(case.to, case.raw or b"")
    return unseal(case.raw or b"")


def _message_of(case: Case, broker: str) -> Message:
    if broker == "redis":
        return unseal(redis_envelope(case)).message
    if broker == "amqp":
        return amqp_envelope.decode(Incoming(1, 0, (), amqp_properties(case), case.body))[0]
    return sqlite_messages.decode(sqlite_row(case))


def read_event(body: bytes) -> list[Any]:
    return [told for event in decode_events(body) for told in read_worker_event(event)]


def read_result(payload: bytes) -> object:
    found = decode_result(payload)
    return found if found.status == "SUCCESS" else rebuild_exception(found.result)


_STREAMS: dict[str, Callable[[], Any]] = {
    "from-child": lambda: FrameReader(FromChild),
    "to-child": lambda: FrameReader(ToChild),
    "from-server": lambda: FrameReader(FromServer),
    "amqp": AmqpFrameReader,
}


def read_frame(stream: str, data: bytes) -> list[Any]:
    """The values in it; none while the first is not whole."""
    found: list[Any] = _STREAMS[stream]().feed(data)
    return found
