"""Admission and endings without a broker: what they ask of the settler is in a list, what they tell too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from umbel import App
from umbel.app.options import SendOptions
from umbel.brokers.interface import Ack, Delivery, Settled, Spend, Tag, Verdict
from umbel.pools.abilities import ABILITIES
from umbel.protocol.delivery.delivery import AdmissionPolicy, Admit, TaskRules
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.trust import Doubt
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.signing import Keyring, Signer
from umbel.worker.context import Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.delivery.admit import Admission, arrival_of, let_run
from umbel.worker.delivery.claimed import Claimed, RetainedOutcomes
from umbel.worker.delivery.end import Endings
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events
from umbel.worker.user_code import Notices

TASK, QUEUE, TAG = "t.task", "celery", 7
Report = tuple[Sequence[StoredResult], Sequence[Outgoing]]


class Sink(Settler):
    """A settler that only writes down what it is handed."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.retained = RetainedOutcomes()
        self._verdicts = []  # of outcomes that wait
        self.kept: list[Outgoing | None] = []  # for the case that the broker has forgotten them
        self.reports: list[Report] = []
        self.released: list[tuple[str, str]] = []
        self.failed: list[tuple[Outgoing, str]] = []  # to be kept, of those that were acknowledged early
        self.first: list[tuple[Callable[[], Ending], int]] = []
        self.joined: list[Tag | None] = []
        self.work_after: list[bytes] = []
        self._broker = cast("Any", SettlingBroker())

    def add(self, verdict: Verdict, message: Outgoing | None = None) -> None:
        self.verdicts.append(verdict)
        self.kept.append(message)

    def add_outcome(self, ack: Ack, delivery: Delivery) -> None:
        assert ack.tag == delivery.tag
        self.add(ack)

    def do_first(
        self, work: Callable[[], Ending], *, attempts_max: int = 0, joins: Tag | None = None
    ) -> None:
        self.first.append((work, attempts_max))
        self.joined.append(joins)

    def report(
        self, results: Sequence[StoredResult], follow_ups: Sequence[Outgoing], after: bytes = b""
    ) -> None:
        if results or follow_ups:
            self.reports.append((list(results), list(follow_ups)))
        if after:
            self.work_after.append(after)

    def retain_failed(self, message: Outgoing, reason: str) -> None:
        self.failed.append((message, reason))

    def release(self, key: str, task_id: str) -> None:
        self.released.append((key, task_id))


@dataclass
class SettlingBroker:
    """What a broker is to admission: early acks and counted starts are settled, or it is not there."""

    settled: list[Verdict] = field(default_factory=list)
    conflicts: frozenset[int | str] = frozenset()
    error: Exception | None = None
    capabilities: Any = field(default_factory=lambda: SimpleNamespace(unique=True, limits=True))
    signer: Signer | None = None
    spent: list[Spend] = field(default_factory=list)
    unusable: Mapping[int | str, Doubt] = field(default_factory=dict)

    @property
    def keyring(self) -> Keyring | None:
        return None if self.signer is None else self.signer.keyring

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[int | str, Doubt]:
        if self.error is not None:
            raise self.error
        self.spent += signatures
        return self.unusable

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        if self.error is not None:
            raise self.error
        self.settled += verdicts
        return Settled(len(verdicts) - len(self.conflicts), self.conflicts)


class Recorded:
    def __init__(
        self,
        *,
        rules: TaskRules | None = None,
        results: str = "redis://127.0.0.1/0",
        pool: str = "prefork",
        signer: Signer | None = None,
        **settings: Any,
    ) -> None:
        self.ended: list[tuple[str, str]] = []  # what was to end without running: (error, status)
        self.signed_for: list[str | None] = []  # what the follow-ups of those are signed for
        chosen = WorkerSettings(
            node="w@host",
            queues=(QUEUE,),
            tasks={TASK: rules or TaskRules()},
            end_without_running=self._end,
            run_directory=Path(),
            send_task_events=True,
            **settings,
        )
        self.broker, self.sink = SettlingBroker(signer=signer), Sink()
        backend, abilities = SimpleNamespace(url=results), SimpleNamespace(abilities=ABILITIES[pool])
        self.context = WorkerContext(
            chosen,
            Identity("w@host", 1, 1),
            cast("Any", self.broker),
            cast("Any", backend),
            cast("Any", abilities),
            notices=Notices(chosen.notices),
        )
        self.policy = AdmissionPolicy(chosen.tasks, max_deliveries=3)
        self.revoked = RevokedTasks()
        self._events = Events(self.context)
        events = self.task_events = TaskEvents(self._events)
        self.endings = Endings(self.context, self.policy, self.sink, events)
        self.admission = Admission(self.context, self.policy, self.revoked, self.sink, self.endings, events)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(body) for _, body in self._events._waiting]

    @property
    def counted(self) -> dict[str, int]:
        """The counters that are not zero."""
        counters = self.context.counters.as_dict()
        return {name: count for name, count in counters.items() if count and name != "processed"}

    def _end(
        self, message: Message, queue: str, error: Exception, status: str, *, signs_for: str | None = ""
    ) -> Ending:
        self.signed_for.append(signs_for)
        self.ended.append((f"{type(error).__name__}: {error}", status))
        return Ending([result_of(status)], [FOLLOW_UP])


def result_of(status: str) -> StoredResult:
    return StoredResult("t", status, b"{}")


def message_of(*args: Any, task: str = TASK, **options: Any) -> Message:
    """One call of the task, under the id t."""
    app = App("recorded", broker="sqlite:///nowhere.db")
    chosen = cast(SendOptions, {"task_id": "t", **options})
    return app.prepare(task, args, {}, chosen).outgoing.message


FOLLOW_UP = Outgoing(QUEUE, message_of())


def delivery_of(message: Message | None = None, **fields: Any) -> Delivery:
    return Delivery(TAG, QUEUE, message or message_of(), **fields)


def claimed_of(run: Admit | None, *, unique: str = "", reply_to: str = "", **fields: Any) -> Claimed:
    """An opened message, as admission hands it on, whose `task-received` was sent."""
    message = replace(message_of(), reply_to=reply_to)
    headers = read_headers(message)
    if unique:
        headers = replace(headers, umbel_unique=unique)
    delivery = delivery_of(message, **fields)
    claimed = Claimed(1, delivery, message, headers, arrival_of(delivery, headers), sent_received=True)
    if run is not None:
        let_run(claimed, run)
        claimed.acked = run.rules.acks_early
    return claimed
