"""N1 for RabbitMQ's streams: an entry that nobody of ours wrote is counted, logged and passed over.

For each stream: what its readers know is unchanged, what comes after it is read, and so it is for those who
start later and read it all again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.brokers.under_test import OWNER, PEER, QUEUE, BrokerUnderTest, outgoing, run, take
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp import topology
from umbel.brokers.amqp.event_log import _logged_event
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.publishing import entry
from umbel.brokers.amqp.signature_view import ClusterEntry, ClusterView, SignatureUse, SignatureView
from umbel.brokers.amqp.streams import (
    ClockView,
    ElectionFact,
    FactsView,
    LeaseFact,
    LogEntry,
    PauseFact,
    QueueFact,
    RecorderFact,
    RevokeView,
    Start,
    StartsView,
    encode_record,
)
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Ack, BrokerSettings, Pause
from umbel.brokers.registry import open_producer
from umbel.protocol.leadership.coordination import ElectionRecord, ElectionRequest, ElectionState, Policy
from umbel.wire.records import Revoke

__all__ = ["amqp_url"]

ANYWHERE = (
    b"",
    b"\xff\xfe",
    b"no JSON",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"-1",
    b"1e999",
    b"[" * 100_000,
    b"9" * 5_000,
    b'{"type": "new in another version"}',
    b'{"task_id": 1, "name": 2, "mark": [], "queue": null}',
)
REQUEST = ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, 1.0)


def record(**values: Any) -> ElectionRecord:
    return ElectionRecord(ElectionState.OPEN, REQUEST, **{"changed_at": 1.0, **values})


def facts_out_of_range() -> list[bytes]:
    """Each would be believed for ever by all who read it; no later version or term could be written."""
    lease = encode_record(LeaseFact("beat", OWNER, 1, 1.0, b"", 1))
    return [
        lease.replace(b'"term":1', b'"term":-1'),
        lease.replace(b'"term":1', b'"term":18446744073709551616'),
        lease.replace(b'"version":1', b'"version":1e30'),
        lease.replace(b'"ttl_s":1.0', b'"ttl_s":-1.0'),
        encode_record(ElectionFact("e" * 32, record(term=2**60), 1)),
        encode_record(ElectionFact("e" * 32, record(changed_at=-1.0), 1)),
        encode_record(RecorderFact("r", 2**60)),
        encode_record(RecorderFact("r", 1, lost=-1)),
        encode_record(QueueFact("q" * 300)),
        encode_record(QueueFact("\0")),
        encode_record(PauseFact("ä" * 200, Pause(1.0))),
    ]


@dataclass(frozen=True)
class Stream:
    name: str
    view: Callable[[], Any]
    good: bytes
    known: Callable[[Any], object]  # what a reader of the good entry knows
    odd: tuple[bytes, ...] = ()


STREAMS = [
    Stream(
        topology.REVOKES,
        RevokeView,
        encode_record(Revoke("t", 1.0, 1e10)),
        lambda view: [one.task_id for one in view.after(0, 2.0)],
    ),
    Stream(
        topology.STARTS,
        StartsView,
        encode_record(Start("celery", "m", 2)),
        lambda view: view.count("celery", "m"),
        (
            encode_record(Start("celery", "m", 7)).replace(b"7", b"-7"),
            encode_record(Start("celery", "m", 7)).replace(b"7", b"18446744073709551616"),
        ),
    ),
    Stream(
        topology.SIGNATURES,
        SignatureView,
        encode_record(SignatureUse("mark", "one", 1e10)),
        lambda view: (view.user("mark", 0.0), view.reaches(0.0)),
        (
            encode_record(SignatureUse("m" * 300, "one", 1e10)),
            encode_record(SignatureUse("", "lost", at=1e12)),
            encode_record(SignatureUse("other", "ended", 1e10, born=-1.0)),
        ),
    ),
    Stream(
        topology.CLUSTER,
        ClusterView,
        encode_record(ClusterEntry("here", 5.5)),
        lambda view: view.found,
        (encode_record(ClusterEntry("a/b", 5.5)), encode_record(ClusterEntry("far", 1e300))),
    ),
    Stream(
        topology.FACTS,
        FactsView,
        encode_record(LeaseFact("beat", OWNER, 5, 9.0, b"", 1)),
        lambda view: (
            view.leases["beat"].term,
            view.last_term,
            view.next_version("lease", "beat"),
            view.queues,
        ),
        tuple(facts_out_of_range()),
    ),
    Stream(
        topology.CLOCK,
        ClockView,
        b"41",
        lambda view: (view.mark, view.stored),
        (b"9007199254740993", b"99999999999999999999999", b"4.5"),
    ),
]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_an_entry_that_cannot_be_used_changes_nothing_and_is_counted(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plain, odd = stream.view(), [*ANYWHERE, *stream.odd]
    plain.apply(0, stream.good)
    for place in ("before", "after"):
        view = stream.view()
        entries = [*odd, stream.good] if place == "before" else [stream.good, *odd]
        for offset, body in enumerate(entries):
            view.apply(offset, body)
        assert stream.known(view) == stream.known(plain), place
        assert view.entries.unreadable == len(odd)
    logged = [one for one in caplog.records if "unreadable entry" in one.getMessage()]
    assert {vars(one)["stream"] for one in logged} == {stream.name}
    assert vars(logged[-1])["count"] == len(odd)


def test_an_odd_entry_of_the_event_log_is_an_unknown_event() -> None:
    odd = [*ANYWHERE, encode_record(LogEntry(1.0, "k", "{}")).replace(b"1.0", b"1e300")]
    for body in odd:
        fields = (topology.EVENTS, 1, False, topology.EVENTS)
        incoming = Incoming(1, 0, fields, b"\x00\x00", body)
        found = _logged_event(7, incoming)
        assert found is not None
        assert (found.offset, found.routing_key, found.body) == (7, "unknown", body)
        assert found.recorded_at <= time.time()


def test_recording_one_revoke_does_not_count_all_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    view = RevokeView()
    for offset in range(100):
        view.apply(offset, encode_record(Revoke(str(offset), 1.0, 1e10)))
    counted: list[int] = []
    count = RevokeView.count_with

    def noted(self: RevokeView, new: Any, now: float) -> int:
        counted.append(len(new))
        return count(self, new, now)

    monkeypatch.setattr(RevokeView, "count_with", noted)
    view.check_room([Revoke("new", 1.0, 1e10)], 1_000, 2.0)
    assert counted == []
    view.check_room([Revoke("99", 1.0, 1e10)], 100, 2.0)  # it is there already
    assert counted == [1]
    with pytest.raises(Exception, match="at its limit of 100 entries"):
        view.check_room([Revoke("new", 1.0, 1e10)], 100, 2.0)


def spoil(url: str) -> None:
    """Write odd entries into every stream."""
    stranger = open_producer(BrokerSettings(url))
    assert isinstance(stranger, AmqpProducer)
    odd = {one.name: [*ANYWHERE, *one.odd] for one in STREAMS} | {topology.EVENTS: list(ANYWHERE)}
    for stream, bodies in odd.items():
        stranger.send([entry(stream, body) for body in bodies])
    stranger.close()


def test_brokers_work_on_and_start_anew_on_streams_with_odd_entries(amqp_url: str) -> None:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)

    async def use(owner: str, name: str) -> None:
        async with under_test.open() as broker:
            await broker.register_recorder("recorder")
            await everything(broker, owner, f"{name} before")
            await asyncio.to_thread(spoil, amqp_url)
            await everything(broker, owner, f"{name} after")

    async def everything(broker: Any, owner: str, name: str) -> None:
        await broker.publish(outgoing(name))
        (held,) = (await take(broker, owner=owner)).deliveries
        assert held.message.body.decode() == name
        await broker.settle([Ack(held.tag)])
        lease = await broker.coordination.acquire_lease(name, owner, ttl_s=60.0)
        assert lease.granted
        assert await broker.coordination.update_lease(name, owner, lease.term, b"data")
        election = ElectionRequest(name, "task", b"{}", Policy.AT_MOST_ONCE, time.time())
        assert (await broker.coordination.open_election(name, election)).state is ElectionState.OPEN
        await broker.coordination.raise_clock(7)
        await broker.pause(QUEUE, Pause(time.time()))
        assert QUEUE in await broker.paused()
        assert await broker.resume(QUEUE)
        await broker.revoke([Revoke(name, time.time(), time.time() + 1000)])
        assert name in [one.task_id for one in (await broker.claim(owner, [QUEUE], 1)).revokes]
        await broker.log_events([("key", b"{}")])
        assert "key" in [one.routing_key for one in await broker.read_events("recorder", 1_000)]
        await broker.queues()
        await broker.sweep()

    run(use(OWNER, "first"))
    run(use(PEER, "second"))
    under_test.producer().revoke([Revoke("by a client", time.time(), time.time() + 1000)])
    under_test.close()
