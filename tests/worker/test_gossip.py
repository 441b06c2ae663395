"""The shells of mingle, gossip and heart on the embedded broker: many light nodes in one process."""

import asyncio
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from msgspec.structs import replace

from tests.waiting import until
from tests.worker.light_node import LightNode, light_nodes
from umbel.brokers.interface import Broadcast, BrokerSettings
from umbel.brokers.links import MAIN
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.clock import boot_time_s
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.membership.members import Change, Joined, Lost, MemberState
from umbel.protocol.membership.observers import GossipMode
from umbel.protocol.shutdown import LinkLost, LinkRestored
from umbel.wire.event import encode_event
from umbel.worker.steps.mingle import TRIES_MAX
from umbel.worker.user_code import WAITING_MAX, HookQueue

LOST, LEFT = MemberState.LOST, MemberState.LEFT


@pytest.mark.parametrize("mode", [GossipMode.FULL, GossipMode.OBSERVED])
def test_both_modes_see_who_joins_leaves_and_is_lost(mode: GossipMode, tmp_path: Path) -> None:
    """With six nodes in observed mode, three hear heartbeats and three do not."""
    names = ("a", "b", "c", "d", "e", "f")

    async def scenario() -> None:
        async with light_nodes(tmp_path, *names, gossip_mode=mode) as nodes:
            await until(
                lambda: all(node.sees() == set(names) for node in nodes.values()), what="all to see all"
            )
            if mode is GossipMode.OBSERVED:
                await until(lambda: len(observers(nodes)) == 3, what="three observers")
            ordinary = [name for name in nodes if name not in observers(nodes)] or ["f"]
            lost = ordinary.pop()
            told: list[Change] = []
            nodes[next(name for name in nodes if name != lost)].gossip.on_change(told.append)
            await nodes.pop(lost).die()
            await until(
                lambda: all(node.sees(LOST) == {lost} for node in nodes.values()), what=f"{lost} to be lost"
            )
            left = next(iter(nodes))
            await nodes.pop(left).stop()
            await until(
                lambda: all(node.sees(LEFT) == {left} for node in nodes.values()), what=f"{left} to have left"
            )
            assert all(node.sees() == set(nodes) for node in nodes.values())
            assert [one.member.node for one in told if isinstance(one, Lost)] == [f"{lost}@x"]

    asyncio.run(scenario())


def test_lost_nodes_are_looked_for_as_often_as_the_interval_says(tmp_path: Path) -> None:
    """S5, S6: one that looks every thousand years is told that a node is lost, and judges nobody."""

    async def scenario() -> None:
        async with (
            light_nodes(tmp_path, "b", "c", gossip_interval_s=None) as prompt,
            light_nodes(tmp_path, "a", gossip_interval_s=3e10) as patient,
        ):
            nodes = [*prompt.values(), *patient.values()]
            await until(lambda: all(node.sees() == {"a", "b", "c"} for node in nodes), what="all to see all")
            told: list[Any] = []
            patient["a"].gossip.listen("worker-lost", told.append)
            await prompt.pop("b").die()
            await until(lambda: prompt["c"].sees(LOST) == {"b"} and told, what="b to be lost")
            assert patient["a"].sees() == {"a", "b", "c"}

    asyncio.run(scenario())


def observers(nodes: dict[str, LightNode]) -> list[str]:
    return [name for name, node in nodes.items() if node.gossip._candidate.observes]


def test_who_hears_no_heartbeats_hears_no_heartbeats(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d", "e")

    async def scenario() -> None:
        async with light_nodes(tmp_path, *names, gossip_mode=GossipMode.OBSERVED) as nodes:
            await until(lambda: len(observers(nodes)) == 3, what="three observers")
            beats: dict[str, list[Any]] = {name: [] for name in names}
            for name, node in nodes.items():
                node.gossip.listen("worker-heartbeat", beats[name].append)
            await until(lambda: all(len(beats[name]) > 20 for name in observers(nodes)), what="beats")
            assert [name for name in names if not beats[name]] == [
                name for name in names if name not in observers(nodes)
            ]

    asyncio.run(scenario())


def test_observers_tell_views_and_the_others_believe_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also whom the view of a peer names that nobody has heard."""
    monkeypatch.setattr("umbel.protocol.membership.observers.VIEW_S", 0.3)

    async def scenario() -> None:
        async with light_nodes(tmp_path, *"abcde", gossip_mode=GossipMode.OBSERVED) as nodes:
            await until(lambda: len(observers(nodes)) == 3, what="three observers")
            other = next(node for name, node in nodes.items() if name not in observers(nodes))
            told: list[dict[str, Any]] = []
            other.gossip.listen("worker-view", told.append)
            await until(lambda: {one["hostname"] for one in told} >= _full(observers(nodes)), what="views")
            await until(lambda: {run[0] for run in told[-1]["runs"]} == _full(nodes), what="whole views")
            runs = [["z@x", 5, 1, 0, 2.0, "umbel"]]
            await tell(other, "worker-online", hostname="y@x", pid=1, inc=7)
            await until(lambda: "y" in other.sees(), what="the observer to be known")
            await tell(other, "worker-view", hostname="y@x", pid=1, inc=7, after="y", until="", runs=runs)
            await until(lambda: "z" in other.sees(), what="it to be believed")

    asyncio.run(scenario())


def _full(names: Iterable[str]) -> set[str]:
    return {f"{name}@x" for name in names}


def test_the_mode_follows_the_size_of_the_cluster_and_is_told_in_heartbeats(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", "b") as nodes:
            a, b = nodes["a"].gossip, nodes["b"].gossip
            await until(lambda: nodes["a"].sees() == {"a", "b"}, what="them to meet")
            for number in range(41):
                await tell(nodes["b"], "worker-online", hostname=f"n{number}@y", pid=1, inc=1, freq=60.0)
            await until(lambda: a.mode is b.mode is GossipMode.OBSERVED, what="both to change")
            await until(
                lambda: any(member.observed for member in a.members()) or not a._machine.observing,
                what="it to be told",
            )
            for number in range(41):
                await tell(nodes["b"], "worker-offline", hostname=f"n{number}@y", pid=1, inc=1, freq=60.0)
            await until(lambda: a.mode is b.mode is GossipMode.FULL, what="both to change back")

    asyncio.run(scenario())


async def tell(by: LightNode, event_type: str, **fields: Any) -> None:
    """In the name of a node whose mark the broker has."""
    await by.broker.mark_alive(fields.get("hostname", "y@y"), fields.get("inc", 1), ttl_s=60.0)
    event = {"type": event_type, "timestamp": 1.0, "clock": 1, **fields}
    key = event_type.replace("-", ".")
    await by.broker.broadcast([Broadcast(EVENT_EXCHANGE, key, encode_event(event))], ttl_s=5.0)


def test_clocks_move_past_what_is_heard_and_own_messages_only_move_them_on(tmp_path: Path) -> None:
    """S4, L2; a clock beyond belief is passed over (poison-proof)."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", "b", heartbeat_interval_s=60.0) as nodes:
            a, b = nodes["a"], nodes["b"]
            heard: list[dict[str, Any]] = []
            b.gossip.listen("worker-test", heard.append)
            b.gossip.listen("worker-elect", heard.append)
            await until(lambda: b.sees() == {"a", "b"}, what="them to meet")
            await tell(a, "worker-test", hostname="z@y", pid=1, clock=5000)
            await until(lambda: heard, what="the event")
            assert b.events.clock.value > 5000
            before = b.events.clock.value
            await tell(a, "worker-test", hostname="z@y", pid=1, clock=2**52)
            await tell(a, "worker-test", hostname="z@y", pid=1, clock=None)
            await tell(a, "worker-elect", hostname="z@y", pid=1, clock=before + 500)
            await tell(
                a, "worker-test", hostname=b.name, pid=1, inc=b.context.identity.incarnation, clock=9999
            )
            await until(lambda: len(heard) == 5, what="all events")
            assert before < b.events.clock.value < before + 20
            assert b.events.clock.rejected == 1
            assert heard[2]["clock"] > before  # it got one (L2)

    asyncio.run(scenario())


@pytest.mark.parametrize("timestamp", ["soon", None, [], 10**400, {}])
def test_a_forged_beat_of_the_node_itself_hurts_nobody(tmp_path: Path, timestamp: object) -> None:
    """N1: what only this node should say, anybody can."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", "b") as nodes:
            a, b = nodes["a"], nodes["b"]
            await until(lambda: b.sees() == {"a", "b"}, what="them to meet")
            inc = b.context.identity.incarnation
            event = {"type": "worker-heartbeat", "hostname": b.name, "inc": inc, "timestamp": timestamp}
            for forged in (event, {name: event[name] for name in ("type", "hostname", "inc")}):
                body = json.dumps(forged).encode()
                await a.broker.broadcast([Broadcast(EVENT_EXCHANGE, "worker.heartbeat", body)], ttl_s=5.0)
            await a.broker.broadcast([Broadcast(EVENT_EXCHANGE, "worker.x", b"")], ttl_s=5.0)
            await until(lambda: b.gossip.undecodable == 1, what="it to hear what came after that")

    asyncio.run(scenario())


def test_what_cannot_be_read_is_counted_and_nothing_else_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S4."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", "b") as nodes:
            a, b = nodes["a"], nodes["b"]
            await until(lambda: b.sees() == {"a", "b"}, what="them to meet")
            for body in (b"", b"{", b"[1]", b'{"no": "type"}', b"\xff"):
                await a.broker.broadcast([Broadcast(EVENT_EXCHANGE, "worker.x", body)], ttl_s=5.0)
            await until(lambda: b.gossip.undecodable == 5, what="all to be counted")
            seen = len(b.gossip.members())
            await tell(a, "worker-online", hostname="z@y", pid=1)
            await until(lambda: len(b.gossip.members()) == seen + 1, what="it to listen on")

    asyncio.run(scenario())
    complaints = [
        record for record in caplog.records if record.message == "unreadable event from another node ignored"
    ]
    assert len(complaints) >= 5


def test_a_newcomer_learns_revokes_members_and_the_clock_before_it_hears_anybody(tmp_path: Path) -> None:
    """S2: all by hello, because nobody beats meanwhile."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", "b", heartbeat_interval_s=60.0) as nodes:
            nodes["a"].revoked.add("t1", 2e9, 1.9e9)
            nodes["b"].events.clock.adjust(10_000)
            await until(lambda: nodes["a"].sees() == {"a", "b"}, what="them to meet")
            async with light_nodes(tmp_path, "c", heartbeat_interval_s=60.0) as more:
                c = more["c"]
                await until(lambda: c.sees() == {"a", "b", "c"}, what="c to know them")
                await until(lambda: "t1" in c.revoked, what="c to know what is revoked")
                await until(lambda: c.events.clock.value > 10_000, what="c to go by the clock")

    asyncio.run(scenario())


def test_the_cluster_has_a_clock_that_outlives_its_nodes(tmp_path: Path) -> None:
    """S2: whoever starts, starts past what the cluster has seen, although nobody is there to tell."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a") as nodes:
            nodes["a"].events.clock.adjust(10_000)
        async with light_nodes(tmp_path, "b") as nodes:
            assert nodes["b"].events.clock.value > 10_000

    asyncio.run(scenario())


def test_a_heartbeat_lives_until_the_next_is_due_and_other_events_for_seconds(tmp_path: Path) -> None:
    """S6: `heartbeat_interval` is also how long a heartbeat waits for who does not read."""

    async def scenario() -> dict[str, tuple[float, dict[str, Any]]]:
        async with light_nodes(tmp_path, "a", heartbeat_interval_s=60.0) as nodes:
            heard: list[dict[str, Any]] = []
            for kind in ("worker-heartbeat", "worker-test"):
                nodes["a"].gossip.listen(kind, heard.append)
            nodes["a"].heart.beat()
            nodes["a"].events.send("worker-test")
            await until(lambda: len(heard) == 2, what="both events")
            with closing(sqlite3.connect(tmp_path / "queue.db")) as db:
                rows = db.execute("SELECT routing_key, expires_at, body FROM broadcasts").fetchall()
        return {key: (expires_at, json.loads(body)) for key, expires_at, body in rows}

    began = boot_time_s()
    kept = asyncio.run(scenario())
    expires_at, beat = kept["worker.heartbeat"]
    assert beat["freq"] == 60.0 and expires_at >= began + 60.0
    expires_at, _ = kept["worker.test"]
    assert expires_at < boot_time_s() + 60.0


def test_a_node_that_is_suspected_or_given_up_refutes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with light_nodes(tmp_path, "a", "b", heartbeat_interval_s=60.0) as nodes:
            a, b = nodes["a"], nodes["b"]
            await until(lambda: b.sees() == {"a", "b"}, what="them to meet")
            heard: list[str] = []
            for kind in ("worker-heartbeat", "worker-online"):
                b.gossip.listen(kind, lambda event: heard.append(event["type"]))
            identity = a.context.identity
            about = {"subject": a.name, "subject_inc": identity.incarnation, "subject_pid": identity.pid}
            await tell(b, "worker-suspect", hostname="z@y", pid=1, **about)
            await until(lambda: heard == ["worker-heartbeat"], what="a to beat")
            await tell(b, "worker-lost", hostname="z@y", pid=1, **about)
            await until(lambda: heard == ["worker-heartbeat", "worker-online"], what="a to come online")

    asyncio.run(scenario())


def test_another_worker_of_the_same_name_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with light_nodes(tmp_path, "a") as nodes:
            await until(lambda: nodes["a"].gossip._machine.observing, what="it to listen")
            await tell(nodes["a"], "worker-online", hostname="a@x", pid=77)
            await until(lambda: "another process" in caplog.text, what="the report")

    asyncio.run(scenario())


def test_joins_are_told_to_whoever_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with light_nodes(tmp_path, "a") as nodes:
            told: list[Change] = []
            nodes["a"].gossip.on_change(told.append)
            async with light_nodes(tmp_path, "b"):
                await until(lambda: told, what="b to join")
            await until(lambda: len(told) == 2, what="b to leave")
            assert isinstance(told[0], Joined) and told[1].member.state is LEFT

    asyncio.run(scenario())


def test_after_a_lost_link_no_task_is_taken_before_hello_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something may have been revoked meanwhile. A hello that fails is said again, and waited for again."""

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a") as nodes:
            node, said, answers = nodes["a"], asyncio.Event(), [""] + ["cut off"] * TRIES_MAX

            async def say_hello(_wait_s: float) -> str:
                await said.wait()
                return answers.pop()

            monkeypatch.setattr(node.mingle, "_say_hello", say_hello)
            assert node.before_taking == {}  # nothing was missed yet
            node.context.outages.link(LinkLost(MAIN, "cut"))
            wait = node.before_taking["mingle"]
            assert wait is not None
            taking = asyncio.create_task(wait())
            assert await asyncio.wait([taking], timeout=0.0) == (set(), {taking})
            said.set()
            node.context.outages.link(LinkRestored(MAIN))
            await taking
            await until(lambda: node.before_taking["mingle"] is None, what="the wait to end")
            assert answers == []

    asyncio.run(scenario())


@pytest.mark.parametrize("part", ["mingle", "gossip", "heartbeat"])
def test_each_part_can_be_off_alone(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S6: the others see a node without gossip or mingle; one without heartbeats is heard of by hello."""
    caplog.set_level("INFO")

    async def scenario() -> None:
        async with (
            light_nodes(tmp_path, "a") as nodes,
            light_nodes(tmp_path, "b", **{f"without_{part}": True}) as others,
        ):
            if part != "heartbeat":
                await until(lambda: nodes["a"].sees() == {"a", "b"}, what="a to see b")
            if part != "gossip":
                await until(lambda: others["b"].sees() == {"a", "b"}, what="b to see a")

    asyncio.run(scenario())
    assert f"disabled by without_{part}" in caplog.text


def test_without_fan_out_the_parts_say_so_and_the_worker_runs_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7."""
    fanless = replace(SqliteBroker(BrokerSettings("sqlite:///x.db")).capabilities, fanout=False)
    monkeypatch.setattr(SqliteBroker, "capabilities", property(lambda _: fanless))

    async def scenario() -> None:
        async with light_nodes(tmp_path, "a") as nodes:
            assert nodes["a"].sees() == {"a"}

    asyncio.run(scenario())
    for part in ("mingle", "gossip", "remote control"):
        assert f"{part} disabled: transport sqlite has no fan-out" in caplog.text


def test_hooks_are_called_in_order_off_the_loop_and_a_hanging_one_holds_up_only_hooks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[int] = []
    done, go_on = Event(), Event()

    def hang(number: int) -> None:
        called.append(number)
        if number == 2:
            done.set()
            go_on.wait(30)
        if number == 1:
            raise LookupError("no")

    hooks = HookQueue({"on_node_join": hang})
    hooks.call("on_node_lost", number=0)  # nobody asked
    for number in range(1, WAITING_MAX + 3):
        hooks.call("on_node_join", number=number)
        assert number != 2 or done.wait(30)
    hooks.call("on_node_join", number=-1)
    assert called == [1, 2] and hooks.dropped == 1
    assert "hook raised an exception" in caplog.text and "hook not called" in caplog.text
    go_on.set()
