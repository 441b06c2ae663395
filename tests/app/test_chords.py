"""Chords in a store: what is sent when, what is left after a crash or a failure, whom the options reach."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from umbel import App, chain, chord
from umbel.app.canvas.group import Chord
from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.request import request_of
from umbel.app.running.follow_ups import BodyOutcome, part_ended
from umbel.app.sending.preparation import Prepared
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.brokers.sqlite.files import path_from_url
from umbel.errors import BrokerRefused
from umbel.protocol.delivery.states import FAILURE, SUCCESS
from umbel.wire.call import TaskCall, decode_task
from umbel.wire.message import Message
from umbel.wire.result import decode_result
from umbel.wire.steps import step_map

NO = {"exc_type": "ValueError", "exc_message": ["no"], "exc_module": "builtins"}


class Crash(BaseException):
    """The process ends here."""


def crash(*_: object) -> None:
    raise Crash


@dataclass(frozen=True)
class Bench:
    app: App
    add: Signature[Any]
    total: Signature[Any]
    tell: Signature[Any]

    def chord(self, **options: Any) -> Chord:
        """Of two parts; its body has the id `body`."""
        whole = Chord([self.add.clone(), self.add.clone()], self.total.clone(), app=self.app)
        whole.set(task_id="body", **options)
        return whole

    def ended(self, part: Prepared, status: str = SUCCESS, value: Any = 1) -> BodyOutcome:
        """A part has run, in a child."""
        call = call_of(part.outgoing.message)
        request = request_of(call, hostname="w@host", queue="celery", redelivered=False, is_eager=False)
        return part_ended(self.app, call, request, status, value)

    def is_open(self, part: Prepared) -> bool:
        group_id = call_of(part.outgoing.message).headers.group
        assert group_id is not None
        return self.app.backend.claim_chord(group_id, part.task_id)

    def sent(self) -> list[TaskCall]:
        """What was sent since this was last asked."""
        return [call_of(message) for message in asyncio.run(self._taken())]

    async def _taken(self) -> list[Message]:
        broker = SqliteBroker(BrokerSettings(self.app.settings.broker))
        await broker.open()
        try:
            claim = await broker.claim("w@host.1.1", ["celery"], 100)
            return [delivery.message for delivery in claim.deliveries]
        finally:
            await broker.close()


def call_of(message: Message) -> TaskCall:
    return decode_task(message)


@pytest.fixture(params=["one store", "two stores"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Results in the broker's own file, where sending and ending are one step; and in another one."""
    broker = f"sqlite:///{tmp_path}/queue.db"
    results = broker if request.param == "one store" else f"sqlite:///{tmp_path}/results.db"
    app = App("chords", broker=broker, backend=results)
    add = app.task(name="add")(lambda *numbers: sum(numbers)).s()
    total, tell = (app.task(name=name)(lambda value: value).s() for name in ("total", "tell"))
    yield Bench(app, add, total, tell)
    app.close()


def test_the_last_part_sends_the_body_with_all_results_in_their_order(bench: Bench) -> None:
    first, second = bench.chord().prepare()
    assert bench.ended(second, value=20) == BodyOutcome()
    assert bench.sent() == []
    assert bench.ended(first, value=10) == BodyOutcome()
    (body,) = bench.sent()
    assert (body.headers.task, body.headers.id, body.args) == ("total", "body", [[10, 20]])
    assert not bench.is_open(first)


def test_the_body_is_a_child_of_the_part_that_sent_it(bench: Bench) -> None:
    first, second = bench.chord().prepare()
    bench.ended(first)
    call = call_of(second.outgoing.message)
    request = request_of(call, hostname="w@host", queue="celery", redelivered=False, is_eager=False)
    part_ended(bench.app, call, request, SUCCESS, 1)
    assert request.children == ["body"]
    (body,) = bench.sent()
    assert (body.headers.parent_id, body.headers.root_id) == (request.id, request.root_id)


def test_a_part_that_is_redelivered_after_the_end_sends_nothing(bench: Bench) -> None:
    first, second = bench.chord().prepare()
    for part in (first, second):
        bench.ended(part)
    assert len(bench.sent()) == 1
    assert [bench.ended(part) for part in (second, first)] == [BodyOutcome(), BodyOutcome()]
    assert bench.sent() == []


def test_a_crash_before_the_body_is_sent_leaves_the_chord_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N1: the part comes again, and sends the body then."""
    first, second = bench.chord().prepare()
    bench.ended(first)

    with monkeypatch.context() as patch:
        if bench.app.backend.shares_settle(bench.app.settings.broker):
            patch.setattr(bench.app.backend, "end_chord", crash)
        else:
            patch.setattr(bench.app.producer, "publish", crash)
        with pytest.raises(Crash):
            bench.ended(second)
    assert bench.sent() == []
    assert bench.is_open(second)
    bench.ended(second)
    assert [body.headers.id for body in bench.sent()] == ["body"]
    assert not bench.is_open(second)


def test_a_crash_after_the_body_was_sent_repeats_it_under_its_id(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores cannot be changed in one step; the body may run twice, never not at all."""
    if bench.app.backend.shares_settle(bench.app.settings.broker):
        pytest.skip("one store knows no in between")
    first, second = bench.chord().prepare()
    bench.ended(first)

    with monkeypatch.context() as patch:
        patch.setattr(bench.app.backend, "end_chord", crash)
        with pytest.raises(Crash):
            bench.ended(second)
    bench.ended(second)
    assert [body.headers.id for body in bench.sent()] == ["body", "body"]


# ---- failures --------------------------------------------------------------------------------------


def test_a_chord_with_a_failed_part_ends_and_its_body_fails(bench: Bench) -> None:
    first, second = bench.chord().prepare()
    assert bench.ended(first, FAILURE, NO) == BodyOutcome()
    outcome = bench.ended(second)
    (result,) = outcome.results
    assert (result.task_id, result.status, list(outcome.follow_ups)) == ("body", "FAILURE", [])
    described = decode_result(result.payload).result
    failed_id = first.task_id
    assert described["exc_type"] == "ChordError"
    assert described["exc_message"] == [f"Dependency {failed_id} raised ValueError('no')"]
    assert bench.sent() == []
    assert not bench.is_open(second)  # what is stored for it may go
    assert bench.ended(second) == BodyOutcome()  # redelivered


def test_a_failed_body_that_is_a_chain_fails_with_all_its_steps(bench: Bench) -> None:
    body = chain(bench.total.clone(), bench.tell.clone())
    first, second = Chord([bench.add.clone(), bench.add.clone()], body, app=bench.app).prepare()
    bench.ended(first)
    outcome = bench.ended(second, FAILURE)
    ids = [step.options["task_id"] for step in body.steps]
    assert [one.task_id for one in outcome.results] == ids and len(set(ids)) == 2


def test_a_body_that_is_a_chain_travels_as_its_first_step_with_the_others_behind_it(bench: Bench) -> None:
    """Celery's workers fail what is behind a body, but not the steps of one that is a chain."""
    body = chain(bench.total.clone(), bench.tell.clone(), bench.add.clone())
    (part,) = Chord([bench.add.clone()], body, app=bench.app).prepare()
    carried = call_of(part.outgoing.message).embed.chord
    assert carried is not None
    assert (carried["task"], carried["subtask_type"]) == ("total", None)
    assert [step["task"] for step in carried["options"]["chain"]] == ["add", "tell"]


@pytest.mark.parametrize("as_list", [True, False])
def test_who_waits_for_a_failure_of_the_body_is_told_its_id(bench: Bench, as_list: bool) -> None:
    errback = bench.tell.to_map()
    whole = bench.chord()
    whole.body.options["link_error"] = [errback, errback] if as_list else errback
    first, second = whole.prepare()
    bench.ended(first)
    outcome = bench.ended(second, FAILURE)
    calls = [call_of(one.message) for one in outcome.follow_ups]
    assert [(call.headers.task, call.args) for call in calls] == [("tell", ["body"])] * (2 if as_list else 1)


def test_a_part_that_is_a_chain_fails_its_chord_with_its_first_step(bench: Bench) -> None:
    """The end of the chain, which is the part, never runs."""
    part = bench.add.clone() | bench.tell.clone()
    first, second = Chord([part, bench.add.clone()], bench.total.clone(), app=bench.app).prepare()
    bench.ended(second)
    outcome = bench.ended(first, FAILURE)
    assert [one.status for one in outcome.results] == ["FAILURE"]
    assert not bench.is_open(second)


@pytest.mark.parametrize("chain_at", [0, 1])
def test_of_several_failed_parts_the_first_in_their_order_is_named(bench: Bench, chain_at: int) -> None:
    """A chain has its place in the header, also when its first step fails."""
    members = [bench.add.clone(), bench.add.clone()]
    members[chain_at] = bench.add.clone() | bench.tell.clone()
    parts = Chord(members, bench.total.clone(), app=bench.app).prepare()
    bench.ended(parts[chain_at], FAILURE)
    outcome = bench.ended(parts[1 - chain_at], FAILURE)
    named = decode_result(outcome.results[0].payload).result["exc_message"][0]
    first = parts[0].task_id if chain_at else members[0].steps[-1].options["task_id"]  # type: ignore[attr-defined]
    assert f"Dependency {first} raised" in named


def test_of_a_chain_within_a_chain_the_last_step_alone_is_the_part(bench: Bench) -> None:
    """As a peer may write it: the steps before are no parts, whatever their options say."""
    (alone,) = bench.add.prepare()
    (other,) = bench.chord().prepare()[1:]
    group_id = call_of(other.outgoing.message).headers.group
    steps = [
        {"task": "add", "options": {"chord": bench.total.to_map(), "group_id": group_id, "task_id": name}}
        for name in ("before", "last")
    ]
    call = call_of(alone.outgoing.message)
    inner: Any = {"task": "celery.chain", "subtask_type": "chain", "kwargs": {"tasks": steps}}
    call.embed.chain = [inner]
    request = request_of(call, hostname="w@host", queue="celery", redelivered=False, is_eager=False)
    assert part_ended(bench.app, call, request, FAILURE, {}) == BodyOutcome()
    assert bench.is_open(other)  # one of two


@pytest.mark.parametrize("as_list", [True, False])
def test_a_failed_body_without_an_id_still_calls_its_errback(bench: Bench, as_list: bool) -> None:
    """N1: a peer may write a body that names no id, and one errback without a list around it."""
    (alone,) = bench.add.prepare()
    errback = bench.tell.to_map()
    body = bench.total.to_map() | {"options": {"link_error": [errback] if as_list else errback}}
    call = call_of(alone.outgoing.message)
    call.embed.chord = body
    bench.app.backend.start_chord("g", 1)
    request = request_of(call, hostname="w@host", queue="celery", redelivered=False, is_eager=False)
    request.group = "g"
    outcome = part_ended(bench.app, call, request, FAILURE, {})
    assert list(outcome.results) == []
    (errback_call,) = [call_of(one.message) for one in outcome.follow_ups]
    assert errback_call.args == [errback_call.headers.parent_id]  # an id of its own


def test_a_part_that_is_a_chain_counts_with_its_last_step_only(bench: Bench) -> None:
    part = bench.add.clone() | bench.tell.clone()
    first, second = Chord([part, bench.add.clone()], bench.total.clone(), app=bench.app).prepare()
    bench.ended(second)
    assert bench.ended(first) == BodyOutcome()
    assert bench.is_open(second)


@pytest.mark.parametrize(
    "step",
    [
        None,
        5,
        "text",
        {},
        {"options": None},
        {"options": {"chord": {}}},
        {"options": {"chord": {"task": "total"}}},  # without group and id
        {"options": {"chord": {"task": "total"}, "group_id": "g"}},
        {"options": {"chord": {"task": "total"}, "task_id": "t"}},
        {"subtask_type": "chain", "kwargs": {"tasks": 7}},
        {"subtask_type": "chain", "kwargs": {"tasks": []}},
        {"subtask_type": "chain", "kwargs": 3, "options": {"chord": {}}},
        {"subtask_type": "chord", "kwargs": {}},
        {"subtask_type": "group", "kwargs": {"tasks": [None, 4]}},
    ],
)
def test_a_chain_in_a_form_of_a_peer_is_no_part_of_a_chord(bench: Bench, step: Any) -> None:
    """N1: the task fails for its own reason."""
    (alone,) = bench.add.prepare()
    call = call_of(alone.outgoing.message)
    call.embed.chain = [step]
    request = request_of(call, hostname="w@host", queue="celery", redelivered=False, is_eager=False)
    assert part_ended(bench.app, call, request, FAILURE, {}) == BodyOutcome()


def test_a_header_may_be_written_as_a_group(bench: Bench) -> None:
    """As some of Celery's versions have it."""
    whole = bench.chord().to_map()
    members = whole["kwargs"]["header"]
    group_map = {"task": "celery.group", "subtask_type": "group", "kwargs": {"tasks": members}}
    whole["kwargs"] = {**whole["kwargs"], "header": group_map}
    found = signature_from(whole, bench.app)
    assert isinstance(found, Chord)
    assert [member.task for member in found.header.members] == ["add", "add"]
    assert (found.body.task, found.options["task_id"]) == ("total", "body")


def test_a_chord_that_is_called_is_sent(bench: Bench) -> None:
    header = [bench.add.clone([1, 2]), bench.add.clone([3])]
    with bench.app.eager():
        assert chord(header, bench.total.clone())().get() == [3, 3]
        assert chord(header)(bench.total.clone()).get() == [3, 3]
        assert chord(header, bench.tell.clone())(bench.total.clone(), task_id="body").id == "body"


# ---- options of the whole --------------------------------------------------------------------------


def test_what_is_said_of_sending_reaches_each_part(bench: Bench) -> None:
    parts = bench.chord(queue="slow", priority=7, expires=600).prepare()
    assert [one.outgoing.queue for one in parts] == ["slow", "slow"]
    assert [one.outgoing.message.priority for one in parts] == [7, 7]
    assert all(call_of(one.outgoing.message).headers.expires for one in parts)
    assert [part.task_id for part in parts].count("body") == 0


def test_a_countdown_of_the_whole_delays_each_part_and_not_the_body(bench: Bench) -> None:
    parts = bench.chord(countdown=600).prepare()
    assert all(one.outgoing.not_before > 0 for one in parts)
    for part in parts:
        bench.ended(part)
    (body,) = bench.sent()  # what is delayed is not taken
    assert body.headers.eta is None


def test_a_part_says_better_where_it_goes(bench: Bench) -> None:
    own = bench.add.clone()
    own.set(queue="own")
    whole = Chord([own, bench.add.clone()], bench.total.clone(), app=bench.app)
    whole.set(queue="slow")
    assert [one.outgoing.queue for one in whole.prepare()] == ["own", "slow"]


def test_the_headers_own_options_come_before_those_of_the_whole(bench: Bench) -> None:
    whole = bench.chord(queue="slow", priority=7)
    whole.header.options["queue"] = "header"
    parts = whole.prepare()
    assert [(one.outgoing.queue, one.outgoing.message.priority) for one in parts] == [("header", 7)] * 2


def test_callbacks_of_the_whole_follow_the_body_and_no_part(bench: Bench) -> None:
    tell = bench.tell.to_map()
    parts = bench.chord(link=[tell], link_error=[tell]).prepare()
    for part in parts:
        embed = call_of(part.outgoing.message).embed
        assert (embed.callbacks or [], embed.errbacks or []) == ([], [])
        bench.ended(part)
    (body,) = bench.sent()
    assert [one["task"] for one in body.embed.callbacks or []] == ["tell"]
    assert [one["task"] for one in body.embed.errbacks or []] == ["tell"]


def test_a_chord_that_is_a_part_of_another_is_one_by_its_body(bench: Bench) -> None:
    inner, outer = bench.chord(), Chord([bench.add.clone()], bench.tell.clone(), app=bench.app)
    whole = Chord([inner, bench.add.clone()], outer.body, app=bench.app)
    for part in whole.prepare()[:2]:
        bench.ended(part)
    (body,) = bench.sent()
    assert body.embed.chord is not None and body.embed.chord["task"] == "tell"
    assert body.headers.group == whole.header.freeze()


def test_what_follows_the_whole_is_said_to_the_body(bench: Bench) -> None:
    """A chord that was itself handed a chain or a chord, as the end of a header is."""
    whole = bench.chord(chain=[bench.tell.to_map()], chord=bench.tell.to_map())
    for part in whole.prepare():
        bench.ended(part)
    (body,) = bench.sent()
    assert [step_map(one)["task"] for one in body.embed.chain or []] == ["tell"]
    assert body.embed.chord is not None and body.embed.chord["task"] == "tell"


def test_an_empty_callback_of_the_whole_takes_none_from_the_body(bench: Bench) -> None:
    whole = bench.chord(link=[])
    whole.body.options["link"] = [bench.tell.to_map()]
    for part in whole.prepare():
        bench.ended(part)
    (body,) = bench.sent()
    assert [one["task"] for one in body.embed.callbacks or []] == ["tell"]


def test_a_clone_keeps_the_options_of_the_whole_and_leaves_the_original_alone(bench: Bench) -> None:
    whole = bench.chord(queue="slow")
    other = whole.clone((5,), queue="other", priority=2)
    assert (other.options["queue"], other.options["priority"]) == ("other", 2)
    assert (whole.options["queue"], "priority" in whole.options) == ("slow", False)
    assert [list(member.args) for member in other.header.members] == [[5], [5]]
    assert [list(member.args) for member in whole.header.members] == [[], []]
    assert other.body is not whole.body


def test_a_chord_without_parts_sends_its_body_with_no_results(bench: Bench) -> None:
    whole = chord([], bench.total.clone())
    whole.set(task_id="body", link=[bench.tell.to_map()])
    (body,) = whole.prepare()
    call = call_of(body.outgoing.message)
    assert (call.headers.id, call.args) == ("body", [[]])
    assert [one["task"] for one in call.embed.callbacks or []] == ["tell"]


def test_a_part_that_cannot_be_counted_fails_the_body_and_not_the_part(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N2: who waits for the body is told."""

    def refuse(*_: object) -> None:
        raise BrokerRefused("the key holds a list")

    first, _ = bench.chord().prepare()
    monkeypatch.setattr(bench.app.backend, "add_chord_part", refuse)
    outcome = bench.ended(first)
    assert [(one.task_id, one.status) for one in outcome.results] == [("body", "FAILURE")]
    assert b"so the chord fails: the key holds a list" in outcome.results[0].payload
    assert outcome.follow_ups == ()


@pytest.mark.parametrize("payload", [b"no JSON", b"[" * 100_000, b"\xff", b""])
@pytest.mark.parametrize("status", [SUCCESS, FAILURE])
def test_a_chord_with_a_part_that_cannot_be_read_fails_with_its_reason(
    bench: Bench, status: str, payload: bytes
) -> None:
    """Somebody wrote into the store: the other parts keep their outcome, and nobody waits for ever."""
    first, second = bench.chord().prepare()
    bench.ended(first)
    with closing(sqlite3.connect(path_from_url(bench.app.settings.backend))) as db, db:
        db.execute("UPDATE chord_parts SET status = ?, payload = ?", (status, payload))
    outcome = bench.ended(second)
    (failure,) = outcome.results
    assert (failure.task_id, failure.status) == ("body", FAILURE)
    assert "cannot be read" in str(decode_result(failure.payload).result)
    assert outcome.follow_ups == []


def test_a_body_that_is_refused_fails_and_the_chord_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N2: where the child sends it, the dead letter is there; elsewhere the worker's settle makes it."""
    first, second = bench.chord().prepare()
    bench.ended(first)
    is_one = bench.app.backend.shares_settle(bench.app.settings.broker)
    if is_one:
        monkeypatch.setattr(
            bench.app.backend, "end_chord", lambda group, batch: [Refused(batch[0], "closed")]
        )
    else:
        monkeypatch.setattr(bench.app.producer, "publish", refuse_all)
    outcome = bench.ended(second)
    assert [(one.task_id, one.status) for one in outcome.results] == ([("body", "FAILURE")] if is_one else [])
    assert [one.message.correlation_id for one in outcome.follow_ups] == ([] if is_one else ["body"])
    assert is_one or not bench.is_open(second)


def refuse_all(batch: object) -> None:
    raise BrokerRefused("closed")
