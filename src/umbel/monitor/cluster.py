"""KnownCluster: the questions that people ask about a cluster, answered from the model.

All answers are computed from memory when they are asked for; the feed polls the broker. Answers leave the
process, so their texts are redacted and cut here: a page or an endpoint cannot forget it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from heapq import nlargest
from time import monotonic, time
from typing import Any, TypeVar

import msgspec

from umbel.brokers.interface import Depth
from umbel.events.state import Tracked
from umbel.events.view import TaskRecord
from umbel.monitor.feed import Feed
from umbel.monitor.model import ClusterModel, load_of
from umbel.monitor.rates import STEP_S, Step, added, grouped, percentile
from umbel.monitor.records import (
    LIST_MAX,
    Election,
    Failing,
    Figures,
    Happening,
    Health,
    Lease,
    Level,
    Mark,
    Node,
    NodeState,
    Overview,
    Queue,
    Rates,
    TaskFilter,
    TaskPage,
    Workflow,
    redact_task,
    redact_text,
)
from umbel.monitor.tasks import admits_of, decode_cursor, encode_cursor, root_of, workflow_of
from umbel.protocol.delivery.redaction import redact
from umbel.protocol.delivery.sensitive import Hides
from umbel.protocol.membership.members import Member

# ---- health ----------------------------------------------------------------------------------------

NAMED_MAX = 3
ENDED_MIN = 10  # fewer ended tasks say little about how many fail
FAILING_SHARE = 0.5


def health_of(
    nodes: Sequence[Node], problem: str, *, waiting: int = 0, done: int = 0, failed: int = 0
) -> Health:
    """Judge the cluster; `done` and `failed` are counts of the last minutes, `waiting` the ready messages."""
    if problem:
        return Health("bad", f"The dashboard receives no events from the cluster: {problem}")
    members = [node for node in nodes if node.state != "left"]
    if not members and waiting:
        return Health(
            "bad", f"No worker is known, and {waiting:,} messages wait; start one with `umbel worker`."
        )
    if not members:
        return Health("warning", "No worker is known; start one with `umbel worker`.")
    silent = [node for node in members if node.state != "alive"]
    if silent:
        alive = len(members) - len(silent)
        level: Level = "bad" if not alive or any(node.state == "lost" for node in silent) else "warning"
        return Health(level, f"{alive} of {len(members)} workers answer; {_named(silent)}.")
    everyone = "The only worker answers" if len(members) == 1 else f"All {len(members)} workers answer"
    if done + failed >= ENDED_MIN and failed > FAILING_SHARE * (done + failed):
        return Health("warning", f"{everyone}, but {failed} of the last {done + failed} tasks failed.")
    return Health("ok", f"{everyone}.")


def _named(silent: Sequence[Node]) -> str:
    named = [f"{node.node} silent for {node.silent_s:.0f} s, {node.state}" for node in silent[:NAMED_MAX]]
    more = len(silent) - NAMED_MAX
    return "; ".join([*named, f"and {more} more"] if more > 0 else named)


# ---- known cluster ---------------------------------------------------------------------------------

FIGURES_S = 5
RECENT_S = 300
FAILING_MAX = 10
POINTS = 360
WORKFLOW_MAX = 1000
PAGE_MAX = 1000
HOUR_S = 3600.0
NODES_S, FAILING_S = 0.25, 5.0
T = TypeVar("T")


def cached(for_s: float) -> Callable[[Callable[["KnownCluster"], T]], Callable[["KnownCluster"], T]]:
    """Reuse a method's answer for so many seconds, because it scans all nodes or tasks and many pages ask."""

    def decorate(method: Callable[["KnownCluster"], T]) -> Callable[["KnownCluster"], T]:
        @wraps(method)
        def answer(cluster: "KnownCluster") -> T:
            answered_at, known = cluster.answers.get(method.__name__, (0.0, None))
            if known is None or monotonic() - answered_at > for_s:
                known = method(cluster)
                cluster.answers[method.__name__] = monotonic(), known
            found: T = known
            return found

        return answer

    return decorate


class KnownCluster:
    """Answers questions from the model that the feed keeps up to date; `hides` names tasks with secrets."""

    def __init__(self, feed: Feed, hides: Hides) -> None:
        self.feed = feed
        self.hides = hides
        self.answers: dict[str, tuple[float, Any]] = {}

    @property
    def model(self) -> ClusterModel:
        """The model that the feed keeps up to date."""
        return self.feed.model

    # -- nodes -----------------------------------------------------------------------------------

    @cached(NODES_S)
    def nodes(self) -> list[Node]:
        """Return all members, by name."""
        members = sorted(self.feed.membership.members, key=lambda member: member.node)
        now = time()
        return [self._node(member, now) for member in members]

    def node(self, name: str) -> Node | None:
        """Return the member of this name; None if there is none."""
        found = (member for member in self.feed.membership.members if member.node == name)
        member = next(found, None)
        return None if member is None else self._node(member, time())

    def _node(self, member: Member, now: float) -> Node:
        worker = self.model.state.workers.get(member.node)
        beat = None if worker is None else worker.newest
        opinions = {
            observer: view[member.node] for observer, view in self.feed.views.items() if member.node in view
        }
        state: NodeState = member.state.value
        return Node(
            node=member.node,
            state=state,
            software=member.software or "unknown",
            version="" if beat is None else beat.sw_ver or "",
            pid=member.pid,
            incarnation=member.inc,
            clock=member.clock if beat is None else max(member.clock, beat.clock),
            freq_s=member.freq_s,
            silent_s=round(max(0.0, now - member.last_heard), 1),
            since_s=round(max(0.0, now - member.since), 1),
            reason=member.reason,
            active=0 if beat is None else beat.active or 0,
            processed=0 if beat is None else beat.processed or 0,
            load=None if beat is None else load_of(beat),
            messages_per_s=round(1.0 / member.freq_s, 3) if member.freq_s and state == "alive" else 0.0,
            queues=list(self.feed.consumers.get(member.node, ())),
            leads=self.model.leases.held_by(member.node),
            seen_by=sum(opinion == "alive" for opinion in opinions.values()),
            differs={observer: opinion for observer, opinion in sorted(opinions.items()) if opinion != state},
        )

    # -- the cluster at a glance -----------------------------------------------------------------

    @cached(NODES_S)
    def health(self) -> Health:
        """Return the state of the cluster in one sentence."""
        recent = self.model.book.since(time() - RECENT_S)
        return health_of(
            self.nodes(),
            self.feed.problem,
            waiting=sum(depth.ready for depth in self.feed.queues.values()),
            done=sum(step.done for step in recent),
            failed=sum(step.failed for step in recent),
        )

    def overview(self) -> Overview:
        """Return the cluster at a glance."""
        model, state = self.model, self.model.state
        states = Counter(member.state.value for member in self.feed.membership.members)
        return Overview(
            health=self.health(),
            now=self.figures(),
            nodes=dict(states),
            tasks=state.counts,
            leader=self._leader(),
            failing=self.failing(),
            clock=model.receiver.clock.value,
            tasks_known=len(state),
            tasks_max=state.tasks_max,
            heard=state.heard,
            unreadable=state.unreadable + model.receiver.undecodable,
            problem=self.feed.problem,
        )

    @cached(NODES_S)
    def figures(self) -> Figures:
        """Return the rates, durations and depths of the last few seconds."""
        now = time()
        recent = self.model.book.recent(now, FIGURES_S)
        steps = self.model.book.since(now - 60)
        wait, run = added(step.wait for step in steps), added(step.run for step in steps)
        depths = self.feed.queues.values()
        oldest = self.feed.oldest
        return Figures(
            events_per_s=sum(second.events for second in recent) / FIGURES_S,
            sent_per_s=sum(second.sent for second in recent) / FIGURES_S,
            done_per_s=sum(second.done for second in recent) / FIGURES_S,
            failed_per_s=sum(second.failed for second in recent) / FIGURES_S,
            retried_per_s=sum(second.retried for second in recent) / FIGURES_S,
            wait_p50_s=percentile(wait, 0.5),
            wait_p95_s=percentile(wait, 0.95),
            run_p50_s=percentile(run, 0.5),
            run_p95_s=percentile(run, 0.95),
            ready=sum(depth.ready for depth in depths),
            delayed=sum(depth.delayed for depth in depths),
            claimed=sum(depth.claimed for depth in depths),
            oldest_s=max(0.0, now - min(oldest.values())) if oldest else None,
        )

    @cached(FAILING_S)
    def failing(self) -> list[Failing]:
        """Return the task names that failed most in the last hour, among the tasks in memory."""
        since_us = (time() - HOUR_S) * 1_000_000
        failed: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        newest: dict[str, Tracked] = {}
        for task in self.model.state.tracked():
            if not task.finished or task.best is None or task.best.at_us < since_us:
                continue
            name = task.name or "?"
            ended[name] += 1
            if task.counted == "FAILURE":
                failed[name] += 1
                if name not in newest or task.key > newest[name].key:
                    newest[name] = task
        return [
            Failing(name, count, ended[name], _error(newest[name]), newest[name].uuid)
            for name, count in failed.most_common(FAILING_MAX)
        ]

    def _leader(self) -> str:
        leases = [lease for lease in self.model.leases.all() if lease.holder]
        of_scheduler = [lease.holder for lease in leases if lease.name == "scheduler"]
        return next(iter([*of_scheduler, *(lease.holder for lease in leases)]), "")

    def happenings(self, *, since: float = 0.0) -> list[Happening]:
        """Return the changes of the last hour, oldest first."""
        since = max(since, time() - HOUR_S)
        recent = [happening for happening in self.model.happenings if happening.at >= since]
        return sorted([*recent, *self.model.elections.decided(since)], key=lambda happening: happening.at)

    def elections(self) -> list[Election]:
        """Return all known elections, the newest first."""
        return [
            msgspec.structs.replace(election, outcome=redact_text(election.outcome))
            for election in self.model.elections.all()
        ]

    def leases(self) -> list[Lease]:
        """Return all known leases, by name."""
        return self.model.leases.all()

    # -- tasks -----------------------------------------------------------------------------------

    def tasks(
        self, wanted: TaskFilter, *, limit: int = 50, cursor: str = "", order: str = "clock"
    ) -> TaskPage:
        """Return a page of the matching tasks, newest first by `clock` (Lamport) or by `time`.

        ConfigurationError if the cursor is not valid.
        """
        find = self._by_time if order == "time" else self._by_clock
        tasks, more = find(wanted, limit, cursor)
        return TaskPage(
            tasks=self._redacted(tasks),
            total=self.count(wanted),
            next=more,
            partial=self.model.state.evicted > 0,
        )

    def _by_clock(self, wanted: TaskFilter, limit: int, cursor: str) -> tuple[list[TaskRecord], str]:
        state = self.model.state
        tasks = state.tasks(
            name=wanted.name or None,
            worker=wanted.worker or None,
            limit=limit + 1,
            below=decode_cursor(cursor, tuple[int, int, str, int, str]) if cursor else None,
            admits=admits_of(wanted, redact, self.hides),
        )
        last = state.place(tasks[limit - 1].uuid) if len(tasks) > limit else None
        return tasks[:limit], "" if last is None else encode_cursor(last)

    def _by_time(self, wanted: TaskFilter, limit: int, cursor: str) -> tuple[list[TaskRecord], str]:
        below = decode_cursor(cursor, tuple[int, str]) if cursor else None
        found = ((0 if task.best is None else task.best.at_us, task.uuid) for task in self._matching(wanted))
        places = nlargest(limit + 1, (place for place in found if below is None or place < below))
        more = encode_cursor(places[limit - 1]) if len(places) > limit else ""
        return self._records(uuid for _, uuid in places[:limit]), more

    def part(
        self, wanted: TaskFilter, offset: int, limit: int, *, key: Callable[[Tracked], Any], reverse: bool
    ) -> list[TaskRecord]:
        """Return a slice of the matching tasks in an order; records are made for the slice only."""
        found = sorted(self._matching(wanted), key=key, reverse=reverse)[offset : offset + limit]
        return self._redacted(self._records(task.uuid for task in found))

    def count(self, wanted: TaskFilter) -> int:
        """Return how many tasks match."""
        return len(self.model.state) if wanted == TaskFilter() else len(self._matching(wanted))

    def ids(self, wanted: TaskFilter) -> list[str]:
        """Return the ids of all matching tasks."""
        return [task.uuid for task in self._matching(wanted)]

    def _matching(self, wanted: TaskFilter) -> list[Tracked]:
        admits = admits_of(wanted, redact, self.hides)
        return [
            task
            for task in self.model.state.tracked()
            if (not wanted.name or task.name == wanted.name)
            and (not wanted.worker or task.worker == wanted.worker)
            and (admits is None or admits(task))
        ]

    def _records(self, ids: Iterable[str]) -> list[TaskRecord]:
        return [record for uuid in ids if (record := self.model.state.task(uuid)) is not None]

    def _redacted(self, tasks: Sequence[TaskRecord]) -> list[TaskRecord]:
        return [redact_task(task, LIST_MAX, self.hides) for task in tasks]

    def workflow(self, task_id: str) -> Workflow | None:
        """Return the workflow that a task is part of; None if the task is unknown."""
        task = self.model.state.task(task_id)
        if task is None:
            return None
        root = task.root_id or task_id
        ids = [item.uuid for item in self.model.state.tracked() if root in (item.uuid, root_of(item))]
        return workflow_of(root, self._records(ids[:WORKFLOW_MAX]), more=max(0, len(ids) - WORKFLOW_MAX))

    # -- queues and charts -----------------------------------------------------------------------

    def queues(self) -> list[Queue]:
        """Return all queues that have messages or consumers, by name."""
        now = time()
        consumers: dict[str, list[str]] = {}
        for node, names in self.feed.consumers.items():
            for name in names:
                consumers.setdefault(name, []).append(node)
        return [
            self._queue(name, sorted(consumers.get(name, ())), now)
            for name in sorted(self.feed.queues.keys() | consumers.keys())
        ]

    def _queue(self, name: str, consumers: list[str], now: float) -> Queue:
        depth = self.feed.queues.get(name, Depth(0, 0, 0))
        in_per_s, out_per_s = self.model.flow.rates(name, now)
        oldest = self.feed.oldest.get(name)
        return Queue(
            queue=name,
            ready=depth.ready,
            delayed=depth.delayed,
            claimed=depth.claimed,
            in_per_s=round(in_per_s, 3),
            out_per_s=round(out_per_s, 3),
            oldest_s=None if oldest is None else round(max(0.0, now - oldest), 1),
            consumers=consumers,
            paused=depth.paused,
        )

    def rates(self, *, last_s: float = HOUR_S, step_s: int = 0) -> Rates:
        """Return the charts of the last seconds, in steps of `step_s` or of a length that fits."""
        now = time()
        last_s = min(max(last_s, STEP_S), HOUR_S)
        step_s = max(STEP_S, (step_s or round(last_s / POINTS)) // STEP_S * STEP_S)
        first = int(now - last_s) // step_s * step_s
        groups = grouped(self.model.book.since(first), step_s)
        at = list(range(first, int(now) + 1, step_s))
        marks = [mark for mark in self.model.marks if mark.at >= first]
        return _columns(step_s, [float(start) for start in at], [groups.get(start) for start in at], marks)


def _error(task: Tracked) -> str:
    return redact("" if task.failed is None else task.failed.exception or "")


def _columns(step_s: int, at: list[float], rows: Sequence[list[Step] | None], marks: list[Mark]) -> Rates:
    def counted(name: str) -> list[int | None]:
        return [None if row is None else sum(getattr(step, name) for step in row) for row in rows]

    def last(name: str) -> list[Any]:
        return [None if row is None else getattr(row[-1], name) for row in rows]

    def shares(name: str, share: float) -> list[float | None]:
        merged = (None if row is None else added(getattr(step, name) for step in row) for row in rows)
        return [None if buckets is None else percentile(buckets, share) for buckets in merged]

    names = sorted({name for row in rows if row for name in row[-1].queues})
    return Rates(
        step_s=step_s,
        at=at,
        sent=counted("sent"),
        done=counted("done"),
        failed=counted("failed"),
        retried=counted("retried"),
        wait_p50_s=shares("wait", 0.5),
        wait_p95_s=shares("wait", 0.95),
        run_p50_s=shares("run", 0.5),
        run_p95_s=shares("run", 0.95),
        ready=last("ready"),
        oldest_s=last("oldest_s"),
        alive=last("alive"),
        queues={name: [None if row is None else row[-1].queues.get(name) for row in rows] for name in names},
        marks=marks,
    )
