"""A node's mailbox on the embedded broker: who answers, what, and what cannot hurt it (P1-P5, P8)."""

import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from tests.brokers.under_test import eventually
from tests.waiting import DEADLINE_S
from tests.worker.light_node import light_nodes
from umbel.backends.interface import Backend
from umbel.brokers.interface import Broadcast, Broker, BrokerSettings
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.control.client import ControlClient
from umbel.control.panel import NO_ANSWER, Panel, UsersPanel
from umbel.errors import ConfigurationError
from umbel.pools.interface import Pool
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.pidbox import MemberReport
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE
from umbel.wire.message import Message
from umbel.worker.context import Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.remote import mailbox
from umbel.worker.remote.control import Control
from umbel.worker.remote.mailbox import BUSY, WAITING_MAX, MailboxFigures
from umbel.worker.remote.view import WorkerView

ENOUGH_S = 10.0  # the deadline of questions that are answered at once
BRIEF_S = 0.3  # of questions that somebody leaves unanswered


@dataclass
class State:
    """A worker of which only the mailbox is there."""

    node: str
    clock: LamportClock = field(default_factory=LamportClock)
    pid: int = 1
    uptime_s: float = 1.0
    task_rules: Mapping[str, TaskRules] = field(
        default_factory=lambda: {"t.add": TaskRules(rate_per_second=0.5), "celery.chord": TaskRules()}
    )
    revoked: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    elections: list[Mapping[str, Any]] = field(default_factory=list)

    def revoked_ids(self) -> Sequence[str]:
        return self.revoked

    async def revoke(self, task_ids: Sequence[str], *, is_recorded: bool) -> None:
        self.revoked += task_ids
        self.recorded += [] if is_recorded else task_ids

    async def hello(self, said: Mapping[str, Any]) -> Any:
        return (
            NO_ANSWER if said["from_node"] == self.node else {"heard": said["revoked"], "more": said["cver"]}
        )

    def members(self) -> Sequence[Mapping[str, Any]]:
        return []

    def elect(self, request: Mapping[str, Any]) -> str:
        self.elections.append(request)
        return ""

    def enable_task_events(self) -> bool:
        return True

    def disable_task_events(self) -> bool:
        return False

    async def look_for_recorders(self) -> None:
        return

    def beat(self) -> None:
        self.clock.forward()

    def stats(self) -> dict[str, Any]:
        return {"pid": self.pid}

    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        return {}


@pytest.fixture(params=["shared", "green"], autouse=True)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both shapes of the mailbox (P6) do the same."""
    monkeypatch.setattr(Cluster, "is_green", request.param == "green")


def nothing(message: Message, queue: str, error: Exception, status: str, **_: object) -> Ending:
    return Ending()


async def nothing_before() -> None:
    pass


@dataclass
class Cluster:
    url: str
    asker: ControlClient
    broker: Broker
    is_green: ClassVar[bool] = False  # whether its nodes have mailboxes with a thread of their own (P6)
    controls: dict[str, Control] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    figures: dict[str, MailboxFigures] = field(default_factory=dict)
    members: dict[str, Sequence[MemberReport]] = field(default_factory=dict)

    @asynccontextmanager
    async def node(
        self, name: str, *, commands: Panel | None = None, allow: tuple[str, ...] = ("all",)
    ) -> AsyncIterator[Control]:
        broker = SqliteBroker(BrokerSettings(self.url))
        await broker.open()
        settings = WorkerSettings(
            node=name,
            queues=(),
            tasks={},
            end_without_running=nothing,
            run_directory=Path("nowhere"),
            control_allow=allow,
            control_commands=commands or Panel(),
            open_broker=lambda: SqliteBroker(BrokerSettings(self.url)),
        )
        nobody, pool = cast("Any", None), cast("Pool", SimpleNamespace(is_green=self.is_green))
        context = WorkerContext(settings, Identity(name, 1, 1), broker, cast("Backend", nobody), pool)
        state = self.states[name] = State(name)
        figures = self.figures[name] = MailboxFigures()
        control = self.controls[name] = Control(
            context,
            state.clock,
            cast("WorkerView", state),
            figures,
            nothing_before,
            members=lambda: self.members.get(name, ()),
        )
        async with asyncio.TaskGroup() as group:
            control.adopt(group)
            await control.start()
            try:
                yield control
            finally:
                await control.stop()
        await broker.close()


def play(
    tmp_path: Path,
    scenario: Callable[[Cluster], Coroutine[Any, Any, None]],
    *,
    deadline_s: float = DEADLINE_S,
) -> None:
    async def bounded() -> None:
        url = f"sqlite:///{tmp_path / 'queue.db'}"
        broker = SqliteBroker(BrokerSettings(url))
        await broker.open()
        try:
            async with asyncio.timeout(deadline_s):
                await scenario(Cluster(url, ControlClient(broker), broker))
        finally:
            await broker.close()

    asyncio.run(bounded())


def test_everyone_answers_and_those_who_are_named(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"), cluster.node("b@x"), cluster.node("c@y"):
            ask, pong = cluster.asker.ask, {"ok": "pong"}
            everyone = await ask("ping", timeout_s=ENOUGH_S, limit=3)
            assert everyone.replies == dict.fromkeys(["a@x", "b@x", "c@y"], pong)
            named = await ask("ping", destination=["b@x"], timeout_s=ENOUGH_S)
            assert (named.replies, named.silent) == ({"b@x": pong}, ())
            missing = await ask("ping", destination=["b@x", "gone@x"], timeout_s=BRIEF_S)
            assert [one.node for one in missing.silent] == ["gone@x"]
            assert set((await ask("ping", pattern="*@x", timeout_s=ENOUGH_S, limit=2)).replies) == {
                "a@x",
                "b@x",
            }
            matched = await ask("ping", pattern="[ab]@y|c@", matcher="pcre", timeout_s=ENOUGH_S, limit=1)
            assert set(matched.replies) == {"c@y"}
            ours = await ask("ping", destination=["@v2"], timeout_s=ENOUGH_S, limit=3)
            assert len(ours.replies) == 3
            with pytest.raises(ConfigurationError, match="not a valid regular expression"):
                await ask("ping", pattern="(", matcher="pcre")

    play(tmp_path, scenario)


def test_a_worker_asks_the_others_on_its_own_connection(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x") as control, cluster.node("b@x"):
            asker = ControlClient(control._context.broker)
            said = {"from_node": "a@x", "revoked": ["new", 7], "cver": 2}
            answers = await asker.ask("hello", said, timeout_s=ENOUGH_S, limit=1)
            assert answers.replies == {"b@x": {"heard": ["new", 7], "more": 2}}
            await asker.tell("election", {"id": "e", "topic": "task", "cver": 2}, destination=["b@x"])

            async def elected() -> list[Mapping[str, Any]]:
                return cluster.states["b@x"].elections

            (request,) = await eventually(elected, what="the request to arrive")
            assert request == {"id": "e", "topic": "task", "action": None, "cver": 2}
            assert not cluster.states["a@x"].elections

    play(tmp_path, scenario)


def test_revokes_are_recorded_and_those_that_are_recorded_are_not_written_again(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"):
            ask, state = cluster.asker.ask, cluster.states["a@x"]
            told = await ask("revoke", {"task_id": "one"}, timeout_s=ENOUGH_S, limit=1)
            assert told.replies == {"a@x": {"ok": "tasks {'one'} flagged as revoked"}}
            await ask("revoke", {"task_id": ["two"], "recorded": True}, timeout_s=ENOUGH_S, limit=1)
            assert (state.revoked, state.recorded) == (["one", "two"], ["one"])

    play(tmp_path, scenario)


def test_a_worker_records_revokes_for_as_long_as_the_setting_says(tmp_path: Path) -> None:
    """Those that it is asked for, and those that a Celery node tells in its hello."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", of_broker={"revoke_retention_s": 60.0}) as nodes:
            broker = nodes["a"].broker
            asker = ControlClient(broker)
            await asker.ask("revoke", {"task_id": ["one"]}, timeout_s=ENOUGH_S, limit=1)
            await asker.ask("hello", {"from_node": "c@y", "revoked": ["two"]}, timeout_s=ENOUGH_S, limit=1)

            async def recorded() -> dict[str, float] | None:
                found = (await broker.claim("nobody", [], 0)).revokes
                held = {entry.task_id: entry.expires_at - entry.recorded_at for entry in found}
                return held if len(held) == 2 else None

            held = await eventually(recorded, what="both revokes")
            assert held == {"one": pytest.approx(60.0), "two": pytest.approx(60.0)}

    asyncio.run(scenario())


def test_a_graph_of_objects_is_drawn_where_the_library_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3. The worker's frozen objects count, and are frozen again."""

    class Leaked:
        pass

    leaked = [Leaked(), Leaked(), Leaked()]
    drawn: list[tuple[list[object], int, list[bool]]] = []

    def show_backrefs(
        objects: list[object], *, max_depth: int, filename: str, highlight: Callable[[object], bool]
    ) -> None:
        drawn.append((objects, max_depth, [highlight(leaked[0]), highlight(drawn)]))
        Path(filename).write_text("digraph")

    def by_type(name: str) -> list[object]:
        return [one for one in gc.get_objects() if type(one).__name__ == name]

    library = SimpleNamespace(by_type=by_type, show_backrefs=show_backrefs)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"):

            async def answer(**arguments: Any) -> Any:
                return (await cluster.asker.ask("objgraph", arguments, timeout_s=ENOUGH_S, limit=1)).replies[
                    "a@x"
                ]

            monkeypatch.setitem(sys.modules, "objgraph", None)
            assert "run: pip install objgraph" in (await answer())["error"]
            monkeypatch.setitem(sys.modules, "objgraph", library)
            gc.freeze()
            try:
                reply = await answer(num=2, max_depth=5, type="Leaked")
                assert gc.get_freeze_count() > 0
            finally:
                gc.unfreeze()
            assert await asyncio.to_thread(Path(reply["filename"]).read_text) == "digraph"
            (objects, max_depth, highlighted) = drawn[0]
            assert len(objects) == 2 and set(map(id, objects)) <= set(map(id, leaked))
            assert (max_depth, highlighted[1]) == (5, False)
            assert "no objects of type 'NoSuchType'" in (await answer(type="NoSuchType"))["error"]
            assert "max_depth 99 are out of range" in (await answer(max_depth=99))["error"]

    play(tmp_path, scenario)


def test_what_goes_wrong_is_the_answer(tmp_path: Path) -> None:
    """P5, with Celery's words."""
    panel = UsersPanel()

    @panel.control_command(args=[("n", int)])
    def fragile(state: object, n: int = 1) -> object:
        if n == 1:
            raise LookupError("nowhere")
        return object()

    @panel.inspect_command
    def leaves(state: object) -> None:
        sys.exit(3)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", commands=panel):

            async def answer(method: str, **arguments: Any) -> Any:
                return (await cluster.asker.ask(method, arguments, timeout_s=ENOUGH_S, limit=1)).replies[
                    "a@x"
                ]

            assert await answer("nosuch") == {"error": "KeyError('nosuch')"}
            assert await answer("fragile") == {"error": "LookupError('nowhere')"}
            assert await answer("fragile", n="3") == {
                "error": "reply['a@x']: json cannot send a <class 'object'>; send plain values, or "
                "serializer='pickle' with 'pickle' in accept_content"
            }
            assert "n must be a whole number, not 'three'" in (await answer("fragile", n="three"))["error"]
            for given in ({"other": 1}, {"state": 1}):
                assert (await answer("fragile", **given))["error"].startswith("TypeError(")
            assert await answer("leaves") == {"error": "SystemExit(3)"}
            assert await answer("ping") == {"ok": "pong"}

    play(tmp_path, scenario)


def test_a_command_of_a_user_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    panel, may_end = UsersPanel(), threading.Event()

    @panel.inspect_command(alias="sluggish")
    def slow(state: Any) -> str:
        may_end.wait(ENOUGH_S)
        return f"done on {state.node}"

    @panel.inspect_command
    async def quick(state: Any) -> str:
        return threading.current_thread().name

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", commands=panel):
            waiting = asyncio.create_task(cluster.asker.ask("sluggish", timeout_s=ENOUGH_S, limit=1))
            for _ in range(20):
                assert (await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=1)).replies
            beside = await cluster.asker.ask("quick", timeout_s=ENOUGH_S, limit=1)
            assert beside.replies == {"a@x": "umbel-control-quick"}
            may_end.set()
            assert (await waiting).replies == {"a@x": "done on a@x"}

    play(tmp_path, scenario)


def test_commands_of_users_wait_for_those_that_run_and_ours_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "HANDLED_MAX", 3)
    panel, may_end, running = UsersPanel(), threading.Event(), threading.Semaphore(0)

    @panel.inspect_command
    def slow(state: Any) -> str:
        running.release()
        may_end.wait(ENOUGH_S)
        return "done"

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", commands=panel):
            ask = cluster.asker.ask
            asked = [asyncio.create_task(ask("slow", timeout_s=ENOUGH_S, limit=1)) for _ in range(10)]
            for _ in range(3):
                assert await asyncio.to_thread(running.acquire, timeout=ENOUGH_S)
            for method in ("clock", "revoke"):
                arguments = {"task_id": "t"} if method == "revoke" else {}
                answer = (await ask(method, arguments, timeout_s=ENOUGH_S, limit=1)).replies["a@x"]
                assert "error" not in answer
            assert not running.acquire(blocking=False)  # a fourth one waits
            may_end.set()
            assert [(await one).replies for one in asked] == [{"a@x": "done"}] * 10

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("allow", "obeyed"),
    [
        (("all",), {"ping", "revoke", "heartbeat"}),
        (("read-only",), {"ping"}),
        (("read-only", "revoke"), {"ping", "revoke"}),
        (("heartbeat",), {"heartbeat"}),
        ((), set()),
    ],
)
def test_a_worker_obeys_what_its_setting_allows(
    tmp_path: Path, allow: tuple[str, ...], obeyed: set[str]
) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", allow=allow) as control:
            for method in ("ping", "revoke", "heartbeat"):
                arguments = {"task_id": "t"} if method == "revoke" else {}
                asked = await cluster.asker.ask(method, arguments, timeout_s=ENOUGH_S, limit=1)
                refused = isinstance(asked.replies["a@x"], dict) and "error" in asked.replies["a@x"]
                assert refused is (method not in obeyed)
                if refused:
                    assert "control_allow" in asked.replies["a@x"]["error"]
            assert control.mailbox.refused == 3 - len(obeyed)

    play(tmp_path, scenario)


@pytest.mark.parametrize("shape", ["shared"], indirect=True)  # the other looks once in a second
def test_the_answers_tell_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7."""
    monkeypatch.setattr("umbel.worker.remote.mailbox.MEMBERS_FRESH_S", 0.0)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"), cluster.node("b@x"):
            alive = [MemberReport("a@x"), MemberReport("b@x")]
            cluster.members = {"a@x": alive, "b@x": alive}
            everyone = await cluster.asker.ask("ping", timeout_s=ENOUGH_S)
            assert len(everyone.replies) == 2 and everyone.silent == ()
            lost = MemberReport("gone@x", "suspect", 41.0)
            cluster.members["a@x"] = [*alive, lost]
            asked = await cluster.asker.ask("ping", timeout_s=BRIEF_S)
            assert asked.silent == (lost,)
            many = [MemberReport(f"n{number:03}@x") for number in range(200)]
            cluster.members = {key: [*many, *alive] for key in ["a@x", "b@x"]}
            large = await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=2)
            assert len(large.silent) == 200  # told by one of the first nodes only

    play(tmp_path, scenario)


BAD = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"method": ["ping"]}',
    b'{"method": "ping", "arguments": "x"}',
    b'{"method": "ping", "reply_to": []}',
    b'{"method": "ping", "pattern": "(", "matcher": "pcre"}',
    b'{"method": "ping", "pattern": "(a+)+$", "matcher": "pcre"}',
    b'{"method": "' + b"x" * 2**20 + b'"}',
    b'{"method": "ping", "arguments": {"x": ' + b"[" * 50 + b"]" * 50 + b"}}",
    b'{"method": "ping", "arguments": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    b'{"method": "shutdown"}',
    b'{"method": "ping", "arguments": {"_state": 1, "state": 2}}',
]


def test_what_is_malformed_or_refused_is_counted_and_hurts_nobody(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", allow=("read-only",)) as control:
            for body in BAD:
                for headers in (b"{}", b"[]", b"nonsense", b'{"expires": "soon"}'):
                    await cluster.broker.broadcast(
                        [Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=ENOUGH_S
                    )
            assert (await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=1)).replies
            box = control.mailbox
            assert box.received == 4 * len(BAD) + 1
            assert (box.malformed, box.refused, box.handled) == (4 * len(BAD) - 4, 2, 2)
            assert cluster.figures["a@x"].resets == 0

    play(tmp_path, scenario)


def test_a_request_is_carried_out_once_and_not_after_its_time(tmp_path: Path) -> None:
    """P8."""

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x"), cluster.broker.subscribe(REPLY_EXCHANGE, ["me"]) as replies:
            heard, state = aiter(replies), cluster.states["a@x"]

            async def send(task_id: str, ticket: str, *, expires: float) -> None:
                request = {
                    "method": "revoke",
                    "arguments": {"task_id": task_id},
                    "ticket": ticket,
                    "reply_to": {"exchange": REPLY_EXCHANGE, "routing_key": "me"},
                }
                headers = json.dumps({"clock": 1, "expires": expires}).encode()
                body = json.dumps(request).encode()
                await cluster.broker.broadcast(
                    [Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=ENOUGH_S
                )

            await send("one", "t1", expires=time() + 60)
            await send("again", "t1", expires=time() + 60)
            await send("late", "t2", expires=time() - 60)
            await send("two", "t3", expires=0)
            answers = [json.loads((await anext(heard)).body)["a@x"] for _ in range(3)]
            # What waits for the broker is answered when it is done, so the order is not that of the requests.
            (refused,) = [answer["error"] for answer in answers if "error" in answer]
            assert "expired" in refused
            assert state.revoked == ["one", "two"]

    play(tmp_path, scenario)


def test_a_flood_of_commands_is_answered_with_an_error_and_a_ping_all_the_same(tmp_path: Path) -> None:
    """N1."""

    async def scenario(cluster: Cluster) -> None:
        async with (
            cluster.node("a@x"),
            cluster.broker.subscribe(REPLY_EXCHANGE, ["me"]) as replies,
        ):
            request = {"method": "clock", "reply_to": {"exchange": REPLY_EXCHANGE, "routing_key": "me"}}
            body, count = json.dumps(request).encode(), 3 * WAITING_MAX
            await cluster.broker.broadcast(
                [Broadcast(REQUEST_EXCHANGE, "", body, b"{}")] * count, ttl_s=ENOUGH_S
            )
            assert (await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=1)).replies
            heard = aiter(replies)
            answers = [json.loads((await anext(heard)).body)["a@x"] for _ in range(count)]
            # How many are too many depends on how quick the machine is; each has one of two answers.
            assert {answer.get("error", "") for answer in answers} <= {"", BUSY}
            assert sum("clock" in answer for answer in answers) >= WAITING_MAX  # all that had a place
            assert cluster.figures["a@x"].replies_dropped == 0

    play(tmp_path, scenario)


FUZZED = 200_000 if os.environ.get("UMBEL_SOAK") else 300


@pytest.mark.timeout(600)
def test_random_requests_hurt_nobody(tmp_path: Path) -> None:
    """Whatever arrives is answered, refused or dropped, and counted; the mailbox goes on (P5)."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.node("a@x", allow=("read-only", "revoke", "enable_events")) as control:
            for number in range(0, FUZZED, 100):
                batch = [_odd_request(chance) for _ in range(min(100, FUZZED - number))]
                await cluster.broker.broadcast(batch, ttl_s=ENOUGH_S)
                assert (await cluster.asker.ask("ping", timeout_s=ENOUGH_S, limit=1)).replies
            box = control.mailbox
            assert box.received == FUZZED + FUZZED // 100
            assert box.malformed and box.refused and box.handled and cluster.figures["a@x"].resets == 0

    play(tmp_path, scenario, deadline_s=500.0)


def _odd_request(chance: random.Random) -> Broadcast:
    def odd(depth: int = 3) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            lambda: chance.randint(-(2**60), 2**60),
            lambda: chance.random() * 1e300,
            lambda: "".join(chance.choices("aZ0*([{\\\x00é@", k=chance.randint(0, 12))),
            lambda: chance.random() < 0.5,
        ]
        if depth:
            kinds += [lambda: [odd(depth - 1) for _ in range(chance.randint(0, 3))]]
            kinds += [lambda: {str(odd(0)): odd(depth - 1) for _ in range(chance.randint(0, 3))}]
        return chance.choice(kinds)()

    methods = ("ping", "stats", "hello", "revoke", "registered", "query_task", "shutdown", "enable_events")
    request: dict[str, Any] = {
        "method": chance.choice(methods),
        "arguments": {chance.choice(("task_id", "ids", "n", "x")): odd()},
        "ticket": str(odd(0)),
        "reply_to": {"exchange": REPLY_EXCHANGE, "routing_key": "nobody"},
    }
    for name in ("method", "arguments", "destination", "pattern", "matcher", "ticket", "reply_to"):
        if chance.random() < 0.15:
            request[name] = odd()
    body = bytearray(json.dumps(request).encode())
    for _ in range(chance.choice((0, 0, 0, 1, 5))):
        body[chance.randrange(len(body))] = chance.randrange(256)
    headers = json.dumps({"clock": odd(1), "expires": chance.choice((0, None, time(), time() - 60, "soon"))})
    return Broadcast(REQUEST_EXCHANGE, "", bytes(body), headers.encode())
