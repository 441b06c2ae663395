"""Every way a message can end lets go of all that it held, on every broker.

`HOLDINGS`: what a message can hold in a broker. `ENDS`: the ways to end, each played by a worker's admission,
endings and settler on a real broker, without a pool. After each, the same call is sent once more: it must get
its key, be permitted at once and run; then the store must have nothing of either message.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.brokers.contract_refusals import refusing_queue
from tests.brokers.under_test import LONG_S, BrokerUnderTest, eventually, run
from tests.servers.pubsub import pubsub_url
from tests.servers.rabbitmq import amqp_url
from tests.servers.redis import ask_redis, redis_server, redis_url
from umbel import App, Concurrency
from umbel.app.options import SendOptions
from umbel.backends.registry import open_backend
from umbel.brokers.amqp.topology import CAPABILITIES as OF_AMQP
from umbel.brokers.composed.producer import composed
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES as OF_PUBSUB
from umbel.brokers.interface import Broker, BrokerSettings, Delivery, Refused, Resend, Return
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.keys import CAPABILITIES as OF_REDIS
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.brokers.sqlite.store import CAPABILITIES as OF_SQLITE
from umbel.control.failures import FailureFilter, find_failed, retry_failed
from umbel.launch.project import task_rules
from umbel.pools.abilities import ABILITIES
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import AdmissionPolicy, Arrival
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.wire.message import Outgoing
from umbel.worker.context import Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.delivery import end as endings_module
from umbel.worker.delivery.admit import Admission
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.end import Endings
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events

__all__ = ["amqp_url", "pubsub_url", "redis_server", "redis_url"]  # fixtures

QUEUE, ELSEWHERE, OWNER, OTHER_OWNER = "celery", "elsewhere", "w@host.1.1", "other@host.2.2"
FAR = time() + 3600
LARGE = "x" * 100_000  # bytes; on Redis such messages are claimed apart


@dataclass(frozen=True)
class Holding:
    """What one message holds: a unique task's key, a slot or a turn under a limit, a body stored apart."""

    unique: bool = False
    limited: bool = False
    large: bool = False

    def __str__(self) -> str:
        return "+".join(name for name, held in vars(self).items() if held) or "nothing"


HOLDINGS = [Holding(*held) for held in product((False, True), repeat=3)]


@dataclass(frozen=True)
class Sent:
    outgoing: Outgoing
    task_id: str


class FaultyPolicy(AdmissionPolicy):
    """Breaks at what it is told to."""

    fails_at = ""

    def admit(self, arrival: Arrival, *args: Any) -> Any:
        if arrival.task_id == self.fails_at:
            raise RuntimeError("a fault of our own")
        return super().admit(arrival, *args)


@dataclass
class Bench:
    """A worker's way with messages, but for its pool; and a client."""

    under_test: BrokerUnderTest
    broker: Broker
    directory: Path
    holding: Holding = Holding()
    owner: str = OWNER
    numbers: int = 0

    def __post_init__(self) -> None:
        self.app = app = App("held", broker=self.under_test.settings.url, backend=self.under_test.results_url)

        @app.task(name="plain")
        def plain(*_args: str) -> None: ...
        @app.task(name="limited", limit=Concurrency(1, key="{key}"))
        def limited(key: str, body: str = "") -> None: ...
        @app.task(name="early", acks_early=True)
        def early(*_args: str) -> None: ...

        self.producer = self.under_test.producer()
        self.policy = FaultyPolicy(task_rules(app, app.settings), max_deliveries=3)
        self.revoked = RevokedTasks()
        self.begin()

    def begin(self, **settings: Any) -> None:
        """A worker; once more, with other settings."""
        chosen = WorkerSettings(
            node="w@host",
            queues=(QUEUE,),
            tasks=self.policy.rules,
            end_without_running=lambda *_, **__: Ending(),
            run_directory=self.directory,
            failed_keep_max_bytes=10**6,
            **settings,
        )
        url = self.under_test.results_url or self.under_test.settings.url
        backend = open_backend(url, BrokerSettings(url))
        self.pool = SimpleNamespace(abilities=ABILITIES["prefork"])
        context = WorkerContext(
            chosen, Identity("w@host", 1, 1), self.broker, backend, cast("Any", self.pool)
        )
        events = TaskEvents(Events(context))
        self.settler = Settler(context, events.step, refused=self.end_refused)
        self.settler._stores_with_acks = True
        self.endings = Endings(context, self.policy, self.settler, events)
        self.admission = Admission(context, self.policy, self.revoked, self.settler, self.endings, events)

    def end_refused(self, refused: Sequence[Refused]) -> None:
        self.endings.end_refused_parts(refused)

    # -- a client ----------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        return f"key of {self.holding}"

    async def send(self, task: str = "", *, not_before: float = 0.0, **options: Any) -> Sent:
        """One message that holds what this play is about."""
        made = self.make(task, **options)
        if self.holding.unique:
            holder = self.producer.hold_unique(self.key, made.task_id, ttl_s=LONG_S * 100)
            assert holder == made.task_id, f"the key is still held by {holder}"
        await self.broker.publish([replace(made.outgoing, not_before=not_before)])
        return made

    def make(self, task: str = "", **options: Any) -> Sent:
        self.numbers += 1
        task = task or ("limited" if self.holding.limited else "plain")
        task_id = f"{task} {self.numbers}"
        stated = {"task_id": task_id, "queue": QUEUE, **options}
        if self.holding.unique:
            stated["unique_token"] = self.key
        args = (self.key, LARGE if self.holding.large else "")
        outgoing = self.app.prepare(task, args, {}, cast(SendOptions, stated)).outgoing
        return Sent(outgoing, task_id)

    # -- a worker ----------------------------------------------------------------------------------

    async def claim(self, count: int = 1, *, owner: str = "") -> Sequence[Delivery]:
        """So many messages, of which not all may be there at once."""
        if isinstance(self.broker, RedisBroker):
            self.broker._claims._large.is_wanted = self.holding.large
        found: list[Delivery] = []

        async def enough() -> bool:
            found.extend((await self.broker.claim(owner or self.owner, [QUEUE], count)).deliveries)
            return len(found) >= count

        await eventually(enough, what=f"{count} messages")
        return found

    async def admit(self, count: int = 1) -> list[Claimed]:
        """Claim so many; those that may run."""
        admitted = await self.admission.admit(await self.claim(count))
        await self.settler.flush()
        return admitted

    async def admit_one(self) -> Claimed:
        (admitted,) = await self.admit()
        return admitted

    async def settle(self, claimed: Claimed, kind: Any, **fields: Any) -> None:
        self.endings.settle(claimed, Outcome(claimed.number, kind, 5.0, 0.5, **fields))
        await self.settler.flush()

    async def lose(self, claimed: Claimed, **fields: Any) -> None:
        lost = LostJob(claimed.number, True, "its process died", ran=True, **fields)
        self.endings.lose(claimed, lost, stopping=False)
        await self.settler.flush()

    async def occupy(self) -> Claimed | None:
        """Another message has the only slot, so that the next one waits."""
        if not self.holding.limited:
            return None
        holding, self.holding = self.holding, Holding(limited=True)
        made = self.app.prepare("limited", (f"key of {holding}",), {}, {"task_id": f"first {self.numbers}"})
        await self.broker.publish([made.outgoing])
        claimed = await self.admit_one()
        self.holding = holding
        return claimed

    async def is_key_held(self) -> bool:
        if not self.holding.unique:
            return False
        mine = self.producer.hold_unique(self.key, "nobody", ttl_s=LONG_S) == "nobody"
        if mine:
            self.producer.release_unique([(self.key, "nobody")])
        return not mine

    # -- what must be so afterwards ------------------------------------------------------------------

    async def check(self) -> None:
        """The same call again gets its key and runs at once; then the store has nothing of any of them."""
        assert not await self.is_key_held(), "the key is still held"
        again = await self.send()
        (claimed,) = await self.claim_admitted(again)
        await self.settle(claimed, "success")
        for letter in await self.broker.dead_letters():
            await self.broker.drop_dead([letter.letter_id])
        kept = [Resend(one, None) for one in await self.broker.failed(100)]
        if kept:
            await self.broker.resend(kept)

        async def nothing_waits() -> bool:
            return not self.under_test.capabilities.depths or await self.broker.queues() == {}

        await eventually(nothing_waits, what="empty queues")
        assert self.left() == []

    async def claim_admitted(self, sent: Sent) -> list[Claimed]:
        admitted = await self.admit()
        assert [one.headers.id for one in admitted] == [sent.task_id], "it may not start"
        return admitted

    @property
    def file(self) -> Path:
        """The embedded broker's."""
        return Path(self.under_test.settings.url.removeprefix("sqlite:///"))

    def left(self) -> list[str]:
        """What the store has of messages that have ended."""
        url = self.under_test.settings.url
        match self.under_test.capabilities.transport:
            case "redis":
                keys = cast("list[bytes]", ask_redis(url, "KEYS", "umbel.*"))
                return sorted(one for key in keys if (one := key.decode()).startswith(_OF_MESSAGES))
            case "sqlite":
                with closing(sqlite3.connect(self.file)) as db:
                    counts = {
                        name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _TABLES
                    }
                return [f"{count} {name}" for name, count in counts.items() if count]
            case _:
                return []


_OF_MESSAGES = (
    "umbel.unique.",
    "umbel.slots.",
    "umbel.waiting.",
    "umbel.held.",
    "umbel.apart.",
    "umbel.delayed.",
)
_TABLES = ("messages", "ready", "delayed", "claimed", "limited", "slots", "uniques")


# -- the ways to end ------------------------------------------------------------------------------------


async def succeeds(bench: Bench) -> None:
    await bench.send()
    await bench.settle(await bench.admit_one(), "success")


async def fails_and_is_kept(bench: Bench) -> None:
    await bench.send()
    await bench.settle(await bench.admit_one(), "failure", summary="no")
    assert await bench.broker.failed(10)


async def is_ignored(bench: Bench) -> None:
    await bench.send()
    await bench.settle(await bench.admit_one(), "ignored")


async def is_acknowledged_early_and_succeeds(bench: Bench) -> None:
    await bench.send("early")
    await bench.settle(await bench.admit_one(), "success")


async def is_acknowledged_early_and_fails(bench: Bench) -> None:
    await bench.send("early")
    await bench.settle(await bench.admit_one(), "failure", summary="no")


async def retries_and_succeeds(bench: Bench) -> None:
    sent = await bench.send()
    await bench.settle(await bench.admit_one(), "retry", follow_ups=[sent.outgoing])
    assert await bench.is_key_held() is bench.holding.unique, "a retry is no end"
    await bench.settle(await bench.admit_one(), "success")


async def its_retry_is_refused(bench: Bench) -> None:
    sent = await bench.send()
    elsewhere = replace(sent.outgoing, queue=refusing_queue(bench.under_test))
    await bench.settle(await bench.admit_one(), "retry", follow_ups=[elsewhere])


async def is_rejected(bench: Bench) -> None:
    await bench.send()
    await bench.settle(await bench.admit_one(), "rejected")
    assert await bench.broker.dead_letters()


async def goes_back_and_succeeds(bench: Bench) -> None:
    await bench.send()
    await bench.settle(await bench.admit_one(), "requeued")
    assert await bench.is_key_held() is bench.holding.unique, "a return is no end"
    await bench.settle(await bench.admit_one(), "success")


async def is_revoked(bench: Bench) -> None:
    sent = await bench.send()
    bench.revoked.add(sent.task_id, FAR)
    assert await bench.admit() == []


async def is_revoked_while_it_waits_for_its_limit(bench: Bench) -> None:
    first = await bench.occupy()
    sent = await bench.send()
    if first is not None:
        assert await bench.admit() == []
        await bench.settle(first, "success")
    bench.revoked.add(sent.task_id, FAR)
    assert await bench.admit() == []


async def has_expired(bench: Bench) -> None:
    await bench.broker.publish([])
    made = bench.make(expires=-5.0)
    if bench.holding.unique:
        bench.producer.hold_unique(bench.key, made.task_id, ttl_s=LONG_S)
    # Without the broker's own expiration: RabbitMQ would drop it before a worker sees it.
    lasting = replace(made.outgoing.message, expiration_ms=None)
    await bench.broker.publish([replace(made.outgoing, message=lasting)])
    assert await bench.admit() == []


async def is_dropped_by_the_broker_as_expired(bench: Bench) -> None:
    """By RabbitMQ, unless a worker has fetched it before."""
    await bench.send(expires=-5.0)

    async def ended() -> bool:
        delivered = (await bench.broker.claim(OWNER, [QUEUE], 1)).deliveries
        assert await bench.admission.admit(delivered) == []
        await bench.settler.flush()
        return await bench.broker.queues() == {}

    await eventually(ended, what="its end")


async def is_unknown(bench: Bench) -> None:
    await bench.send("unknown")
    assert await bench.admit() == []


async def has_started_too_often(bench: Bench) -> None:
    await bench.send()
    (delivery,) = await bench.claim()
    await bench.broker.settle([Return(delivery.tag, charged=3, ran=True)])
    assert await bench.admit() == []
    assert await bench.broker.dead_letters()


async def kills_its_process_each_time(bench: Bench) -> None:
    await bench.send()
    for _ in range(3):
        await bench.lose(await bench.admit_one())
    assert await bench.broker.dead_letters()


async def runs_into_its_time_limit(bench: Bench) -> None:
    await bench.send()
    await bench.lose(await bench.admit_one(), timed_out=True)


async def breaks_the_pool(bench: Bench) -> None:
    await bench.send()
    await bench.lose(await bench.admit_one(), fault="no child takes it")


async def is_terminated(bench: Bench) -> None:
    await bench.send()
    await bench.settle(await bench.admit_one(), "cancelled")


async def is_beyond_the_pool(bench: Bench) -> None:
    await bench.send(time_limit=5.0)
    bench.pool.abilities = ABILITIES["threads"]
    assert await bench.admit() == []
    bench.pool.abilities = ABILITIES["prefork"]


async def is_too_large(bench: Bench) -> None:
    await bench.send()
    bench.begin(message_max_bytes=10)
    assert await bench.admit() == []
    bench.begin()


async def is_too_large_when_its_turn_comes(bench: Bench) -> None:
    first = await bench.occupy()
    await bench.send()
    if first is not None:
        assert await bench.admit() == []
        await bench.settle(first, "success")
    bench.begin(message_max_bytes=10)
    assert await bench.admit() == []
    bench.begin()


async def has_headers_that_cannot_be_read(bench: Bench) -> None:
    made = bench.make()
    if bench.holding.unique:
        bench.producer.hold_unique(bench.key, made.task_id, ttl_s=LONG_S)
    headers = made.outgoing.message.headers.replace(b'"retries":0', b'"retries":"none"')
    await bench.broker.publish(
        [replace(made.outgoing, message=replace(made.outgoing.message, headers=headers))]
    )
    assert await bench.admit() == []


async def meets_a_fault_of_ours(bench: Bench) -> None:
    sent = await bench.send()
    bench.policy.fails_at = sent.task_id
    assert await bench.admit() == []
    assert await bench.broker.dead_letters()


async def its_worker_dies_and_another_runs_it(bench: Bench) -> None:
    await bench.broker.leave_queue(OWNER, QUEUE)  # or RabbitMQ may send the message ahead to this one
    await bench.send()
    async with bench.under_test.open() as other:
        mine, bench.broker = bench.broker, other
        bench.owner = OTHER_OWNER
        bench.begin()
        await bench.admit_one()
        await other.forget_owner(OTHER_OWNER)
        bench.broker, bench.owner = mine, OWNER
        bench.begin()
    await bench.settle(await bench.admit_one(), "success")


async def is_purged(bench: Bench) -> None:
    await bench.send()
    assert await bench.broker.purge(QUEUE) == 1


async def is_purged_before_it_is_due(bench: Bench) -> None:
    await bench.send(not_before=FAR)
    assert await bench.broker.purge(QUEUE) == 1


async def is_purged_after_a_worker_has_parked_it(bench: Bench) -> None:
    await bench.send()
    (delivery,) = await bench.claim()
    await bench.broker.settle([Return(delivery.tag, not_before=FAR)])
    assert await bench.broker.purge(QUEUE) == 1


async def is_purged_after_a_run(bench: Bench) -> None:
    await bench.send()
    await bench.lose(await bench.admit_one())

    async def purged() -> bool:
        return await bench.broker.purge(QUEUE) == 1

    await eventually(purged, what="the message that was returned")


async def is_purged_while_it_waits_for_its_limit(bench: Bench) -> None:
    first = await bench.occupy()
    await bench.send()
    if first is not None:
        assert await bench.admit() == []
    assert await bench.broker.purge(QUEUE) == 1
    if first is not None:
        await bench.settle(first, "success")


async def is_purged_when_its_turn_has_come(bench: Bench) -> None:
    first = await bench.occupy()
    await bench.send()
    if first is not None:
        assert await bench.admit() == []
        await bench.settle(first, "success")
    assert await bench.broker.purge(QUEUE) == 1


async def is_moved_and_runs(bench: Bench) -> None:
    await bench.send()
    await move_there(bench)
    await move_back(bench)
    assert await bench.is_key_held() is bench.holding.unique, "a move is no end"
    await bench.settle(await bench.admit_one(), "success")


async def is_moved_and_purged(bench: Bench) -> None:
    await bench.send()
    await move_there(bench)
    assert await bench.broker.purge(ELSEWHERE) == 1


async def is_moved_before_it_is_due_and_purged(bench: Bench) -> None:
    await bench.send(not_before=FAR)
    await move_there(bench)
    assert await bench.broker.purge(ELSEWHERE) == 1


async def is_moved_when_its_turn_has_come_and_runs(bench: Bench) -> None:
    await its_turn_comes(bench)
    await move_there(bench)
    await move_back(bench)
    await bench.settle(await bench.admit_one(), "success")


async def is_moved_when_its_turn_has_come_and_purged(bench: Bench) -> None:
    await its_turn_comes(bench)
    await move_there(bench)
    assert await bench.broker.purge(ELSEWHERE) == 1


async def its_turn_comes(bench: Bench) -> None:
    first = await bench.occupy()
    await bench.send()
    if first is not None:
        assert await bench.admit() == []
        await bench.settle(first, "success")


async def move_there(bench: Bench) -> None:
    if not bench.under_test.capabilities.limits:  # RabbitMQ may have sent it ahead
        await bench.broker.leave_queue(OWNER, QUEUE)
    assert await bench.broker.move(QUEUE, ELSEWHERE, 10) == 1


async def move_back(bench: Bench) -> None:
    assert await bench.broker.move(ELSEWHERE, QUEUE, 10) == 1


async def is_set_aside_unread(bench: Bench) -> None:
    """By a broker that looks at sizes first, and has another limit than who sent it."""
    await its_turn_comes(bench)
    by_size = bench.under_test.capabilities.transport in ("sqlite", "redis")
    if not by_size or not bench.holding.large:
        await bench.settle(await bench.admit_one(), "success")
        return
    async with bench.under_test.open(message_max_bytes=1000) as strict:
        claim = await strict.claim(OTHER_OWNER, [QUEUE], 1)
        assert len(claim.set_aside) == 1 and not claim.deliveries
        await strict.forget_owner(OTHER_OWNER)


async def is_in_a_malformed_row(bench: Bench) -> None:
    """Of the embedded broker's file."""
    await its_turn_comes(bench)
    if isinstance(bench.broker, SqliteBroker):
        with closing(sqlite3.connect(bench.file)) as db, db:
            db.execute("UPDATE messages SET starts = 'many'")
        assert await bench.broker._thread.call(bench.broker._store.set_aside)
    else:
        await bench.settle(await bench.admit_one(), "success")


async def is_in_a_malformed_row_of_what_is_not_due(bench: Bench) -> None:
    await bench.send(not_before=FAR)
    if isinstance(bench.broker, SqliteBroker):
        with closing(sqlite3.connect(bench.file)) as db, db:
            db.execute("UPDATE delayed SET not_before = 'soon'")
        assert await bench.broker._thread.call(bench.broker._store.set_aside)
    else:
        assert await bench.broker.purge(QUEUE) == 1


async def is_a_dead_letter_that_is_dropped(bench: Bench) -> None:
    await is_rejected(bench)
    (letter,) = await bench.broker.dead_letters()
    assert await bench.broker.drop_dead([letter.letter_id]) == 1


async def is_a_dead_letter_that_is_requeued(bench: Bench) -> None:
    await is_rejected(bench)
    (letter,) = await bench.broker.dead_letters()
    assert await bench.broker.requeue_dead([letter.letter_id]) == 1
    await bench.settle(await bench.admit_one(), "success")


async def is_a_dead_letter_that_is_requeued_and_purged(bench: Bench) -> None:
    await is_rejected(bench)
    (letter,) = await bench.broker.dead_letters()
    assert await bench.broker.requeue_dead([letter.letter_id]) == 1
    assert await bench.broker.purge(QUEUE) == 1


async def is_a_dead_letter_that_is_retried(bench: Bench) -> None:
    await is_rejected(bench)
    await retry_all(bench)
    await bench.settle(await bench.admit_one(), "success")


async def is_a_failure_that_is_retried(bench: Bench) -> None:
    await fails_and_is_kept(bench)
    await retry_all(bench)
    await bench.settle(await bench.admit_one(), "success")


async def is_a_failure_that_is_dropped(bench: Bench) -> None:
    await fails_and_is_kept(bench)
    await bench.broker.resend([Resend(one, None) for one in await bench.broker.failed(10)])


async def retry_all(bench: Bench) -> None:
    done = await retry_failed(bench.broker, await find_failed(bench.broker, FailureFilter()))
    assert len(done.sent) == 1 and not done.refused


End = Callable[[Bench], Awaitable[None]]
ENDS: Sequence[End] = (
    succeeds,
    fails_and_is_kept,
    is_ignored,
    is_acknowledged_early_and_succeeds,
    is_acknowledged_early_and_fails,
    retries_and_succeeds,
    its_retry_is_refused,
    is_rejected,
    goes_back_and_succeeds,
    is_revoked,
    is_revoked_while_it_waits_for_its_limit,
    has_expired,
    is_dropped_by_the_broker_as_expired,
    is_unknown,
    has_started_too_often,
    kills_its_process_each_time,
    runs_into_its_time_limit,
    breaks_the_pool,
    is_terminated,
    is_beyond_the_pool,
    is_too_large,
    is_too_large_when_its_turn_comes,
    has_headers_that_cannot_be_read,
    meets_a_fault_of_ours,
    its_worker_dies_and_another_runs_it,
    is_purged,
    is_purged_before_it_is_due,
    is_purged_after_a_worker_has_parked_it,
    is_purged_after_a_run,
    is_purged_while_it_waits_for_its_limit,
    is_purged_when_its_turn_has_come,
    is_moved_and_runs,
    is_moved_and_purged,
    is_moved_before_it_is_due_and_purged,
    is_moved_when_its_turn_has_come_and_runs,
    is_moved_when_its_turn_has_come_and_purged,
    is_set_aside_unread,
    is_in_a_malformed_row,
    is_in_a_malformed_row_of_what_is_not_due,
    is_a_dead_letter_that_is_dropped,
    is_a_dead_letter_that_is_requeued,
    is_a_dead_letter_that_is_requeued_and_purged,
    is_a_dead_letter_that_is_retried,
    is_a_failure_that_is_retried,
    is_a_failure_that_is_dropped,
)


ENDS_ON_PUBSUB = (
    its_retry_is_refused,
    is_rejected,
    is_purged,
    is_purged_before_it_is_due,
    is_purged_after_a_run,
)


@pytest.fixture(params=["sqlite", "redis", "amqp"])
def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerUnderTest]:
    name = request.param
    url = f"sqlite:///{tmp_path / 'umbel.db'}" if name == "sqlite" else request.getfixturevalue(f"{name}_url")
    capabilities = {"sqlite": OF_SQLITE, "redis": OF_REDIS, "amqp": OF_AMQP}[name]
    made = BrokerUnderTest(BrokerSettings(url), capabilities)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings_module, "REQUEUE_PAUSE_S", 0.0)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_nothing_is_held_after_a_message(end: End, under_test: BrokerUnderTest, tmp_path: Path) -> None:
    able = under_test.capabilities
    held = [one for one in HOLDINGS if (able.unique or not one.unique) and (able.limits or not one.limited)]
    run(play(end, held, under_test, tmp_path))


@pytest.mark.parametrize("end", ENDS_ON_PUBSUB, ids=lambda end: end.__name__)
def test_nothing_is_held_after_a_message_on_pubsub(
    end: End, pubsub_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Its messages are in one broker and their keys in another."""
    settings = BrokerSettings(pubsub_url, coordination_store=redis_url)
    results = f"sqlite:///{tmp_path / 'results.db'}"
    with closing(BrokerUnderTest(settings, composed(OF_PUBSUB, OF_REDIS), results_url=results)) as under_test:
        run(play(end, [Holding(unique=True)], under_test, tmp_path))


async def play(end: End, held: Sequence[Holding], under_test: BrokerUnderTest, directory: Path) -> None:
    async with under_test.open() as broker:
        bench = Bench(under_test, broker, directory)
        for bench.holding in held:
            await end(bench)
            try:
                await bench.check()
            except AssertionError as error:
                raise AssertionError(f"a message that held {bench.holding}: {error}") from error
