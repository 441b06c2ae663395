"""Nothing but JSON is decoded before its signature stands: a walk over everything that decodes.

Two lists are compared with the code, so that a new decoder cannot be forgotten: where anything could run
code that bytes choose, and what reads bytes that others wrote. Each of the latter is then given bombs.
"""

import ast
import base64
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.corpus.readers import read_event
from umbel.brokers.amqp import envelope as amqp_envelope
from umbel.brokers.amqp.envelope import decode_properties
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.signature_view import ClusterView, SignatureView
from umbel.brokers.amqp.streams import FactsView, RevokeView, StartsView, attempt_of
from umbel.brokers.gcpubsub import posts
from umbel.brokers.interface import DeadLetter
from umbel.brokers.redis.keys import cluster_of
from umbel.control.failures import failed_task, retry_message
from umbel.errors import WireError
from umbel.history.rows import KINDS, read_any, read_list
from umbel.outbox.table import decode_progress, decode_row
from umbel.protocol.delivery.trust import ClusterId
from umbel.wire import (
    call,
    compression,
    control,
    envelope_redis,
    event,
    message,
    records,
    result,
    retried,
    signing,
    steps,
    task,
    values,
)
from umbel.wire import message as messages
from umbel.wire.message import Message, Outgoing

SOURCE = Path(messages.__file__).parent.parent
SIGNER = signing.Signer(signing.Keyring([("k", b"s" * 32)]), ClusterId("here"))
EVERY = ("json", "msgpack", "pickle")

# -- where code could run that bytes choose --------------------------------------------------------------

MODULES = frozenset(
    ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "jsonpickle",
     "joblib", "runpy", "code", "codeop", "kombu.serialization", "kombu.compression")
)  # fmt: skip
NAMES = frozenset(("eval", "exec", "literal_eval", "SERIALIZERS", "accepted_serializer"))
CALLED_WITH_ACCEPT = frozenset(("decode_task", "retried", "request_of", "body_of"))

KNOWN = {
    "wire/values.py": "the serializers themselves",
    "wire/call.py": "decode_task: of a message that is verified, or in JSON (`verification.py`)",
    "wire/task.py": "encode_task writes with them",
    "wire/control.py": "a pickled request, where there are no keys",
    "wire/retried.py": "a letter; with keys only one in JSON (`failures.py`)",
    "control/failures.py": "with keys it accepts JSON alone",
    "app/running/tracer.py": "in a child, a message that the main process has verified",
    "history/isolation.py": "what the process that started it asks, by a socket that only the two have",
    "launch/project.py": "the same message, when it ends without running",
    "celery/messages.py": "the same messages, by Celery's own code",
    "celery/host.py": "prepares which serializers Celery's code accepts, in a child",
    "celery/main_process.py": "the same, for messages that do not run, and for handlers of signals",
    "testing/inbox.py": "what a test has sent itself",
    "web/performer.py": "literal_eval: of the text of arguments, where there are no keys",
    "protocol/machine.py": "exec: of the names of our own fields",
}


def dangerous(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name in MODULES)
            case ast.ImportFrom(module=module, names=names):
                yield from [module] if module in MODULES else []
                yield from (one.name for one in names if one.name in NAMES)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords):
                accepts = name in CALLED_WITH_ACCEPT and any(one.arg == "accept" for one in keywords)
                if name in NAMES or accepts:
                    yield name
            case ast.Name(id=name) if name in NAMES:
                yield name


def test_what_could_run_code_is_used_only_where_it_is_known_why_that_is_safe() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {name for name, path in files.items() if any(dangerous(ast.parse(path.read_text())))}
    assert found == KNOWN.keys()


def test_the_walk_finds_what_it_looks_for() -> None:
    for line in (
        "import pickle",
        "def f(x):\n    import marshal",
        "from kombu.serialization import loads",
        "f(SERIALIZERS)",
        "decode_task(m, accept=s)",
        "eval(x)",
    ):
        assert list(dangerous(ast.parse(line))), line
    assert not list(dangerous(ast.parse("decode_task(m)\njson.dumps(x)")))


# -- what reads bytes that others wrote ------------------------------------------------------------------

OUTSIDE = ("bytes", "bytes | None", "Message", "Incoming", "Broadcast")
FOLDERS = (
    "wire", "outbox", "events", "history", "brokers/amqp", "brokers/gcpubsub", "brokers/redis", "coordination"
)  # fmt: skip
Probe = Callable[[bytes], object]


def message_of(data: bytes, content_type: str = values.SERIALIZERS["pickle"].content_type) -> Message:
    return Message(b'{"task":"t","id":"i"}', data, content_type, "binary", correlation_id="i")


def in_messages(read: Callable[[Message], object]) -> Probe:
    """As the body under every content type, compressed, and as the headers."""

    def probe(data: bytes) -> None:
        kinds = [one.content_type for one in values.SERIALIZERS.values()]
        for kind in (*kinds, "application/x-yaml", "text/plain"):
            for one in (
                message_of(data, kind),
                message_of(b"[%b,{},{}]" % data, kind),
                replace(
                    message_of(zlib.compress(data), kind),
                    headers=b'{"task":"t","id":"i","compression":"application/x-gzip"}',
                ),
                replace(message_of(b"[[],{},{}]", kind), headers=data),
                replace(message_of(b"[[],{},{}]", kind), properties=data),
            ):
                refused(partial(read, one))

    return probe


def in_pairs(read: Callable[[bytes, bytes], object], *pairs: tuple[bytes, bytes]) -> None:
    for headers, body in pairs:
        refused(partial(read, headers, body))


def refused(read: Callable[[], object]) -> None:
    """Whatever is raised by a decoder is its own error: the tests of each say which."""
    try:
        read()
    except (WireError, *OWN_ERRORS):
        return


def letter_of(message: Message) -> DeadLetter:
    signed = SIGNER.sign_task(Outgoing("q", message), 1.0).message
    return DeadLetter(1, "q", signed, SIGNER.vouched("it failed", signed, "q", 2.0), 0, 3.0, failed=True)


def retry_letters(message: Message) -> None:
    """As somebody wrote it, and as a worker vouches for it."""
    for letter in (DeadLetter(1, "q", message, "it failed", 0, 3.0, failed=True), letter_of(message)):
        found = failed_task(letter)
        if found is not None:
            refused(partial(retry_message, found, SIGNER, accept=EVERY, even_if_used=True))


def as_stream(view: Any) -> Probe:
    return lambda data: view().apply(0, data)


OWN_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, LookupError, struct.error, RecursionError)
READERS: dict[str, Probe] = {
    "brokers/amqp/dead_letters.letter_of": lambda data: amqp_envelope.decode(Incoming(1, 0, (), data, data)),
    "brokers/amqp/envelope.decode": lambda data: amqp_envelope.decode(Incoming(1, 0, (), data, data)),
    "brokers/amqp/envelope.decode_broadcast": lambda data: amqp_envelope.decode_broadcast(
        Incoming(1, 0, (1, 2, 3, "k"), data, data), "x"
    ),
    "brokers/amqp/envelope.table_of": amqp_envelope.table_of,
    "brokers/amqp/envelope.decode_properties": decode_properties,
    "brokers/amqp/streams.attempt_of": in_messages(attempt_of),
    "brokers/amqp/streams.RevokeView": as_stream(RevokeView),
    "brokers/amqp/streams.StartsView": as_stream(StartsView),
    "brokers/amqp/streams.FactsView": as_stream(FactsView),
    "brokers/amqp/signature_view.SignatureView": as_stream(SignatureView),
    "brokers/amqp/signature_view.ClusterView": as_stream(ClusterView),
    "brokers/gcpubsub/posts.read_letter": lambda data: posts.read_letter(data, "1", "2026-01-01T00:00:00Z"),
    "brokers/redis/keys.cluster_of": cluster_of,
    "coordination/failures": in_messages(retry_letters),
    "events/stamp.receive": read_event,
    "history/rows.read_any": read_any,
    "history/rows.read_list": lambda data: [read_list(kind, data) for kind in KINDS.values()],
    "outbox/table.decode_progress": decode_progress,
    "outbox/table.decode_row": lambda data: [decode_row(data), decode_row(msgspec.msgpack.encode(data))],
    "wire/call.read_headers": in_messages(call.read_headers),
    "wire/call.holding_of": in_messages(call.holding_of),
    "wire/call.read_header_map": call.read_header_map,
    "wire/call.decode_task": in_messages(call.decode_task),
    "wire/call.body_bytes": in_messages(
        lambda one: call.body_bytes(one, "application/x-gzip", values.DEFAULT_LIMITS)
    ),
    "wire/task.to_v2": in_messages(task.to_v2),
    "wire/compression.decompress": lambda data: compression.decompress(
        data, "application/x-gzip", limits=values.DEFAULT_LIMITS
    ),
    "wire/control.decode_request": lambda data: in_pairs(
        partial(control.decode_request, signer=SIGNER, accept=EVERY),
        (b"{}", data),
        (data, b'{"method":"ping"}'),
        (signed_headers(data), data),
    ),
    "wire/control.decode_reply": lambda data: in_pairs(
        control.decode_reply, (b"{}", data), (data, b'{"n":1}')
    ),
    "wire/envelope_redis.unseal": lambda data: [
        envelope_redis.unseal(one) for one in (data, b'{"body":"%b"}' % base64.b64encode(data))
    ],
    "wire/envelope_redis.due_of": envelope_redis.due_of,
    "wire/event.decode_events": event.decode_events,
    "wire/message.others_of": in_messages(message.others_of),
    "wire/message.properties_of": in_messages(message.properties_of),
    "wire/result.decode_result": result.decode_result,
    "wire/retried.retry_of": retried.retry_of,
    "wire/retried.requeued": in_messages(
        lambda one: retried.requeued(
            "q", one, starts=1, stored="why", signer=SIGNER, now=1.0, even_if_used=True
        )
    ),
    "wire/records.decode_marks": records.decode_marks,
    "wire/records.decode_pauses": records.decode_pauses,
    "wire/signing.check_task": in_messages(lambda one: SIGNER.check_task(one, "q")),
    "wire/signing.letter": in_messages(lambda one: SIGNER.letter(one, "q", "why")),
    "wire/signing.vouched": in_messages(lambda one: SIGNER.vouched("why", one, "q", 1.0)),
    "wire/signing.check_request": lambda data: in_pairs(SIGNER.check_request, (b"{}", data), (data, data)),
    "wire/steps.cut_steps": steps.cut_steps,
    "wire/values.decode_json": values.decode_json,
    "wire/values.is_readable": values.is_readable,
}
"""By file and name: what reads bytes from outside, and how it is given some."""

ELSEWHERE = {
    "wire/retried.retried": "by coordination/failures, which decides what it may decode",
    "wire/values.decode_json_as": "by all of them",
    "brokers/amqp/frames.feed": "by tests/fuzz, as a stream",
    "brokers/amqp/frames.decode_short": "by decode_properties",
    "brokers/amqp/frames.decode_table": "by decode_properties",
    "brokers/amqp/frames.decode_value": "by decode_properties",
    "brokers/amqp/layouts.layout_of": "of properties that were decoded",
    "brokers/amqp/layouts.read": "of properties that were decoded",
    "brokers/amqp/streams.is_copy": "by attempt_of",
    "brokers/amqp/streams.skip": "by the views, to log it",
    "brokers/amqp/streams.read": "by the views",
    "brokers/amqp/streams.offset_of": "by decode_properties",
    "brokers/gcpubsub/api.read_pulled": "of Google's own answers, in JSON",
    "brokers/gcpubsub/http.feed": "of Google's own answers",
    "brokers/redis/queues.letter_of": "by unseal",
    "brokers/redis/holding.read": "by unseal",
}
"""Read by another of them, which is given bombs."""

WRITERS = frozenset(
    ("brokers/amqp/blocking.send",
     "brokers/amqp/confirms.take_back", "brokers/amqp/confirms.takes_back", "brokers/amqp/blocking.write",
     "brokers/amqp/coordination.fenced_publish", "brokers/amqp/coordination.update_lease",
     "brokers/amqp/envelope.encode", "brokers/amqp/envelope.encode_broadcast",
     "brokers/amqp/frames.encode_publish", "brokers/amqp/handshake.step", "brokers/amqp/link.receive",
     "brokers/amqp/link.send",
     "brokers/amqp/publishing.broadcast", "brokers/amqp/publishing.dead_letter",
     "brokers/amqp/publishing.entry",
     "brokers/amqp/publishing.kept_failure", "brokers/gcpubsub/posts.copy_of",
     "brokers/gcpubsub/posts.broadcast", "brokers/gcpubsub/posts.letter",
     "brokers/redis/publishing.reply_commands", "brokers/redis/coordination.fenced_publish",
     "brokers/redis/coordination.update_lease", "brokers/redis/holding.hand_in",
     "brokers/redis/holding.has_ended", "brokers/redis/holding.take_in", "brokers/redis/link.data_received",
     "wire/compression.compress", "wire/envelope_redis.seal", "wire/envelope_redis.seal_broadcast",
     "wire/message.unreadable", "wire/message.delivery_info_of", "wire/signing.sign_request",
     "wire/signing.signed_task")
)  # fmt: skip
"""They make bytes, pass them on, or look at a protocol of a server of ours."""


def signed_headers(data: bytes) -> bytes:
    return SIGNER.sign_request(b"{}", data, 1.0)


def takers() -> Iterator[str]:
    """All that is public and takes bytes, by file and name; the views of streams by their class."""
    for folder in FOLDERS:
        for path in (SOURCE / folder).rglob("*.py"):
            name = path.relative_to(SOURCE).as_posix().removesuffix(".py")
            for node in ast.parse(path.read_text()).body:
                for function, owner in functions_in(node):
                    given = [*function.args.args, *function.args.kwonlyargs]
                    kinds = {ast.unparse(one.annotation) for one in given if one.annotation is not None}
                    if kinds.intersection(OUTSIDE) and not function.name.startswith("_"):
                        yield f"{name}.{owner if function.name == 'apply' else function.name}"


def functions_in(node: ast.stmt) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node, ""
    if isinstance(node, ast.ClassDef):
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                yield one, node.name


def test_every_reader_of_bytes_is_in_the_list() -> None:
    plain = {"brokers/amqp/streams.View", "brokers/amqp/streams.ClockView"}  # a Protocol; digits
    known = READERS.keys() | ELSEWHERE.keys() | WRITERS | plain
    found = {*takers(), "coordination/failures"}
    assert (found - known, known - found) == (set(), set())


class Explosive:
    """A pickle of it leaves a file where it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


@pytest.fixture
def bombs(tmp_path: Path) -> Iterator[list[bytes]]:
    """Pickles of every protocol, as they are and in what JSON and MessagePack could hold."""
    file = tmp_path / "exploded"
    pickles = [pickle.dumps(Explosive(file), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    pickles += [pickle.dumps([[Explosive(file)], {}, {}], 4), pickle.dumps({"method": Explosive(file)}, 2)]
    wrapped = [
        msgspec.json.encode({"__type__": kind, "__value__": base64.b64encode(pickles[-1]).decode()})
        for kind in ("pickle", "object", "bytes", "py/reduce")
    ]
    yield [*pickles, *wrapped, *(msgspec.msgpack.encode(one) for one in pickles)]
    assert not file.exists(), "a bomb went off"
    pickle.loads(pickles[0])
    assert file.exists(), "no bomb would ever go off"


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_runs_what_bytes_choose_where_there_are_keys(reader: str, bombs: list[bytes]) -> None:
    for bomb in bombs:
        refused(partial(READERS[reader], bomb))
