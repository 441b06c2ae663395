"""Elections in a worker, on the embedded broker: handlers, faults, the sweep, Celery's form (E3, R1-R6)."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.brokers.under_test import eventually
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.coordination.driver import drive
from umbel.coordination.election_context import ElectionContext
from umbel.errors import BrokerUnavailable, WireError
from umbel.protocol.election.events import CallStart, Event, StartReplied
from umbel.protocol.leadership.coordination import (
    NAMESPACE,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Instant,
    Policy,
    election_key,
)
from umbel.protocol.membership.members import Member, MemberState
from umbel.wire.control import REQUEST_EXCHANGE, decode_request
from umbel.wire.coordination import request_arguments
from umbel.wire.message import Message
from umbel.worker.context import Counters, Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.events import Events
from umbel.worker.steps.elections import StoreCalls, StoreElections
from umbel.worker.user_code import Handler


def ends(message: Message, queue: str, error: Exception, status: str, **_: object) -> Ending:
    return Ending()


def request(topic: str = "say", election_id: str = "e", action: bytes = b'{"n":1}') -> ElectionRequest:
    return ElectionRequest(election_id, topic, action, Policy.AT_MOST_ONCE, time())


@dataclass
class Node:
    rules: StoreElections
    broker: SqliteBroker
    events: Events
    counters: Counters

    async def opened(self, asked: ElectionRequest) -> ElectionRequest:
        key = election_key(NAMESPACE, asked.election_id)
        return (await self.broker.coordination.open_election(key, asked)).request

    async def record(self, election_id: str = "e") -> ElectionRecord | None:
        return await self.broker.coordination.read_election(election_key(NAMESPACE, election_id))

    async def outcome(self, election_id: str = "e") -> ElectionRecord:
        async def ended() -> ElectionRecord | None:
            record = await self.record(election_id)
            over = record is not None and record.state not in (ElectionState.OPEN, ElectionState.HELD)
            return record if over else None

        found = await eventually(ended, what="the election to end")
        assert found is not None
        return found

    def told(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in self.all_told() if event["type"] == event_type]

    def all_told(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(body) for _, body in self.events._waiting]


@asynccontextmanager
async def node(tmp_path: Path, **handlers: Handler) -> AsyncIterator[Node]:
    broker = SqliteBroker(BrokerSettings(f"sqlite:///{tmp_path / 'queue.db'}"))
    await broker.open()
    settings = WorkerSettings(
        node="ada@host",
        queues=(),
        tasks={},
        end_without_running=ends,
        run_directory=tmp_path,
        election_handlers=handlers,
    )
    nobody = cast("Any", None)
    context = WorkerContext(settings, Identity("ada@host", 7, 1), broker, nobody, nobody)
    events = Events(context)
    rules = StoreElections(context, events)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(rules.run(group))
        try:
            yield Node(rules, broker, events, context.counters)
        finally:
            running.cancel()
            await rules.close()
    await broker.close()


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_handler_runs_off_the_loop_with_its_action_and_its_election_r3(tmp_path: Path) -> None:
    seen: list[tuple[threading.Thread, Any, ElectionContext, bool]] = []

    def say(action: Any, context: ElectionContext) -> str:
        seen.append((threading.current_thread(), action, context, context.still_mine()))
        return "said"

    async def scenario() -> None:
        async with node(tmp_path, say=say) as here:
            assert here.rules.asked(request_arguments(await here.opened(request()))) == ""
            record = await here.outcome()
            assert (record.state, record.outcome) == (ElectionState.DONE, "ok: said")
            (thread, action, context, mine) = seen[0]
            assert thread is not threading.current_thread()
            assert (action, context.election_id, context.term, mine) == ({"n": 1}, "e", record.term, True)
            await eventually(lambda: _now(len(here.told("worker-elected")) == 2), what="both events")
            elected, done = here.told("worker-elected")
            assert (elected["phase"], elected["request"]["id"]) == ("elected", "e")
            assert (done["phase"], done["outcome"], done["winner"]) == ("done", "ok: said", "ada@host.7.1")
            assert (here.counters.elections_run, here.counters.elections_done) == (1, 1)

    play(scenario)


def test_an_async_handler_is_awaited(tmp_path: Path) -> None:
    async def say(action: Any, context: ElectionContext) -> str:
        return await asyncio.to_thread(str.lower, "WAITED")

    async def scenario() -> None:
        async with node(tmp_path, say=say) as here:
            here.rules.asked(request_arguments(await here.opened(request())))
            assert (await here.outcome()).outcome == "ok: waited"

    play(scenario)


def test_a_handler_that_raises_is_reported_and_the_next_one_runs_r4(tmp_path: Path) -> None:
    def say(action: Any, context: ElectionContext) -> None:
        raise SystemExit("enough")

    async def scenario() -> None:
        async with node(tmp_path, say=say) as here:
            for election_id in ("e", "f"):
                here.rules.asked(request_arguments(await here.opened(request(election_id=election_id))))
                assert (await here.outcome(election_id)).outcome == "error: SystemExit('enough')"
            assert here.counters.election_handlers_failed == 2

    play(scenario)


def test_an_unknown_topic_is_said_and_observed_e3(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path, say=lambda action, context: None) as here:
            problem = here.rules.asked(request_arguments(await here.opened(request("other"))))
            assert problem == "no handler for topic 'other' on this node; it has say"
            record = await here.record()
            assert record is not None and record.state is ElectionState.OPEN

    play(scenario)


def test_nonsense_is_refused_before_it_reaches_the_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as here:
            with pytest.raises(WireError, match="topic of an election is 7"):
                here.rules.asked({"id": "e", "topic": 7, "cver": 2})
            with pytest.raises(WireError, match="election phase 'wishful' is unknown"):
                here.rules.elected({"eid": "e", "phase": "wishful"})

    play(scenario)


def test_the_sweep_brings_what_no_message_brought(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path, say=lambda action, context: None) as here:
            await here.opened(request())
            await here.rules.sweep()
            assert (await here.outcome()).state is ElectionState.DONE

    play(scenario)


def test_the_sweep_sends_on_what_it_has_no_handler_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as here:
            asked = await here.opened(request())
            async with here.broker.subscribe(REQUEST_EXCHANGE, ["bob@host"]) as commands:
                await here.rules.sweep()
                async for broadcast in commands:
                    sent = decode_request(broadcast.headers, broadcast.body)
                    assert (sent.method, sent.destination) == ("election", ("@v2",))
                    assert sent.arguments == request_arguments(asked)
                    break

    play(scenario)


def test_a_handler_that_runs_keeps_a_stopping_worker_busy(tmp_path: Path) -> None:
    go = threading.Event()

    def say(action: Any, context: ElectionContext) -> None:
        go.wait(20)

    async def scenario() -> None:
        async with node(tmp_path, say=say) as here:
            here.rules.asked(request_arguments(await here.opened(request())))
            await eventually(lambda: _now(here.counters.elections_run), what="the handler to run")
            here.rules.begin_stop()
            here.rules.asked(request_arguments(await here.opened(request(election_id="late"))))
            go.set()
            await eventually(lambda: _now(not here.rules.busy), what="the handler's end to be stored")
            assert (await here.outcome()).state is ElectionState.DONE
            late = await here.record("late")
            assert late is not None and late.state is ElectionState.OPEN

    play(scenario)


def test_a_celery_clients_election_is_entered_with_the_lowest_clock_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path, task=lambda action, context: None) as here:
            celery, umbel = member("c@host", "py-celery"), member("ada@host", "umbel")
            here.rules.members_changed([umbel], [celery])
            assert here.rules.asked({"id": "e", "topic": "task", "action": {"task": "t"}}) == ""
            elects = here.told("worker-elect")
            assert [(one["id"], one["clock"], one["cver"]) for one in elects] == [("e", 1, 2)] * 2
            assert here.all_told()[:2] == elects
            assert here.counters.elections_unfenced == 1
            assert (await here.outcome()).state is ElectionState.DONE

    play(scenario)


def test_a_slow_store_is_asked_once_at_a_time_and_its_late_answer_serves() -> None:
    async def scenario() -> None:
        store, answers = SlowStore(), list[Event]()
        calls = StoreCalls(cast("Any", store), 30.0, answers.append)
        call = CallStart("e", "key", "ada@host.7.1", 5, sent_s=1.0)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            calls.make(call, group)
            calls.make(call.replaced(sent_s=2.0), group)
            calls.make(call.replaced(election_id="f"), group)
            await eventually(lambda: _now(len(store.asked) == 2), what="the calls")
            store.answer.set()
        assert [cast("StartReplied", one).sent_s for one in answers] == [1.0, 1.0]
        async with asyncio.TaskGroup() as group:
            calls.make(call.replaced(sent_s=3.0), group)
        assert answers[-1] == StartReplied("e", 5, 3.0, ok=True)

    play(scenario)


def test_a_store_that_fails_is_counted_and_answers_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """That the broker is away is logged once for all, by those who use it all the time."""

    async def scenario() -> None:
        store, answers = SlowStore(BrokerUnavailable("gone")), list[Event]()
        store.answer.set()
        calls = StoreCalls(cast("Any", store), 30.0, answers.append)
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                calls.make(CallStart("e", "key", "ada@host.7.1", 5, sent_s=1.0), group)
        assert (answers, calls.failed) == ([], 3)

    play(scenario)
    assert not caplog.records


class SlowStore:
    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[int] = []
        self.answer = asyncio.Event()
        self._error = error

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        self.asked.append(term)
        await self.answer.wait()
        if self._error is not None:
            raise self._error
        return True


def test_a_fault_of_the_machine_costs_one_input_r4() -> None:
    class Faulty:
        deadline = None

        def step(self, event: object, now: Instant) -> list[object]:
            if event == "odd":
                raise KeyError(event)
            return [event]

    counters, done = Counters(), list[object]()
    context = cast("Any", SimpleNamespace(counters=counters))

    async def perform(effect: object) -> None:
        done.append(effect)
        raise asyncio.CancelledError

    async def scenario() -> None:
        inbox: asyncio.Queue[object] = asyncio.Queue()
        for event in ("odd", "good"):
            inbox.put_nowait(event)
        await drive(Faulty(), inbox, perform, on_fault=partial(WorkerContext.note_election_fault, context))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())
    assert (counters.election_errors, done) == (1, ["good"])


def member(name: str, software: str) -> Member:
    return Member(name, 1, 1, MemberState.ALIVE, software, 0, 2.0, 0.0, 0.0)


async def _now(value: Any) -> Any:
    return value
