"""Seeds that are in order: from these a change leads to inputs that are wrong at one place only."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.corpus.case import BROKERS, Case, Kind
from tests.fuzz.stored import stored_seeds
from umbel.pools.interface import Job, Outcome, UserEvent
from umbel.pools.prefork.messages import Exited, Forked, Loaded
from umbel.wire.call import Embed, TaskCall, TaskHeaders
from umbel.wire.envelope_redis import seal
from umbel.wire.frames import JobBatch, Outcomes, Ready, SoftLimit, encode_frame
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.steps import check_signature
from umbel.wire.task import encode_task

TASK = "corpus_tasks.take"


def seeds() -> Sequence[Case]:
    return [*_tasks(), *_broadcasts(), *_results(), *_frames(), *stored_seeds()]


def _case(name: str, kind: Kind, brokers: Sequence[Any] = BROKERS, **fields: Any) -> Case:
    return Case(f"seed-{name}", "In order, before it was changed.", kind, brokers, {"else": "runs"}, **fields)


def _tasks() -> list[Case]:
    headers = TaskHeaders(
        task=TASK, id="seed", root_id="root", parent_id="parent", group="group", group_index=0, retries=1,
        eta="2020-01-01T00:00:00+00:00", expires="2199-01-01T00:00:00Z", timelimit=(600, 500.5),
        argsrepr="(1,)", kwargsrepr="{}", origin="gen@here", stamps={"a": ["b"]}, stamped_headers=["a"],
    )  # fmt: skip
    follows = check_signature({"task": TASK, "args": [1], "options": {"queue": "celery", "priority": 3}})
    group = {"task": "celery.group", "subtask_type": "group", "kwargs": {"tasks": [dict(follows)]}}
    embed = Embed([follows], [follows], [check_signature(group), follows], None)
    message = encode_task(
        TaskCall(headers, [1, "x", None, 2.5, {"a": [True]}], {"k": {"__type__": "x"}}, embed)
    )
    plain = encode_task(TaskCall(TaskHeaders(task=TASK, id="seed"), [1], {"a": 2}))
    parts = [_case(f"task-{n}", "task", headers=one.headers, body=one.body, properties=_PROPERTIES)
             for n, one in enumerate((message, plain))]  # fmt: skip
    v1 = {
        "task": TASK,
        "id": "seed",
        "args": [1],
        "kwargs": {},
        "retries": 0,
        "eta": None,
        "timelimit": [5, 6],
    }
    parts.append(_case("task-v1", "task", body=json.dumps(v1).encode()))
    sealed = seal(plain, "celery", "tag")
    marked = b'{"umbel": {"starts": 1, "redelivered": true, "not_before": 1700000000.5}, ' + sealed[1:]
    parts += [_case(f"sealed-{n}", "envelope", ["redis"], raw=one) for n, one in enumerate((sealed, marked))]
    return [*parts, _case("row", "envelope", ["sqlite"], raw=msgspec.msgpack.encode(message))]


_PROPERTIES = {
    "priority": 0,
    "reply_to": "me",
    "content_type": "application/json",
    "content_encoding": "utf-8",
}


def _broadcasts() -> list[Case]:
    beat = {"type": "worker-heartbeat", "hostname": "seed@corpus", "timestamp": 1.5, "clock": 7, "pid": 9,
            "inc": 5, "freq": 2.0, "sw_ident": "umbel", "loadavg": [1, 2, 3], "active": 0}  # fmt: skip
    view = beat | {"type": "worker-view", "after": "", "until": "", "runs": [["a@b", 1, 2, 3, 2.0, "umbel"]]}
    lost = beat | {"type": "worker-lost", "subject": "a@b", "subject_inc": 1, "subject_pid": 2, "reason": "x"}
    done = beat | {"type": "task-succeeded", "uuid": "seed", "result": "1", "runtime": 0.5}
    told = [_case(f"event-{n}", "event", body=json.dumps(one).encode(), to=str(one["type"]).replace("-", "."))
            for n, one in enumerate((beat, view, lost, done))]  # fmt: skip
    told.append(_case("events", "event", body=json.dumps([done, done]).encode(), to="task.multi"))
    to = {"exchange": "reply.celery.pidbox", "routing_key": "corpus"}
    asked = {"method": "revoke", "arguments": {"task_id": "seed", "terminate": False}, "destination": ["x@y"],
             "pattern": None, "matcher": None, "ticket": "seed", "reply_to": to}  # fmt: skip
    said = {"from_node": "a@b", "revoked": ["x"], "ages": [1.5], "cver": 2}
    hello = asked | {"method": "hello", "arguments": said, "destination": None}
    told += [_case(f"request-{n}", "control", headers=b'{"clock":1,"expires":4102444800.0}',
                   body=json.dumps(one).encode()) for n, one in enumerate((asked, hello))]  # fmt: skip
    headers = b'{"ticket":"x","clock":3,"members":[["a@b","alive",0.5,true]],"total":5}'
    return [*told, _case("reply", "reply", headers=headers, body=b'{"a@b":{"ok":"pong"}}', to="ping")]


def _results() -> list[Case]:
    done = {"status": "SUCCESS", "result": [1], "traceback": None, "children": [[["a", None], None]],
            "date_done": "2026-01-01T00:00:00", "task_id": "seed", "group_id": "g"}  # fmt: skip
    error = {"exc_type": "KeyError", "exc_message": ["x"], "exc_module": "builtins"}
    failed = done | {"status": "FAILURE", "result": error, "traceback": "Traceback"}
    return [
        _case(f"result-{n}", "result", raw=json.dumps(one).encode()) for n, one in enumerate((done, failed))
    ]


def _frames() -> list[Case]:
    message = Message(b"{}", b"[]")
    job = Job(1, TASK, "seed", "celery", message, 5.0, 6.0, False, True)
    stored, sent = StoredResult("seed", "SUCCESS", b"{}"), Outgoing("celery", message, 5.0)
    outcome = Outcome(1, "success", 1.0, 0.5, [stored], [sent], "1", "", 0.0)
    streams = {
        "to-child": [JobBatch(1, [job]), SoftLimit(1)],
        "from-child": [Outcomes([outcome]), Ready(5), UserEvent(1, "seed", 1.0, b"{}")],
        "from-server": [Loaded("", 5), Forked(1, 2), Exited(1, 9)],
    }
    return [
        _case(f"frame-{stream}-{n}", "frame", (), raw=bytes(encode_frame(one)), to=stream)
        for stream, values in streams.items()
        for n, one in enumerate(values)
    ]
