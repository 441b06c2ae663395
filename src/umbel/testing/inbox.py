"""Inbox: the calls that a test has sent, and the stage that holds and runs them in this process.

The stage stands behind `umbel_inbox`, where calls wait until the test runs them, and `umbel_eager`, where
they run when they are sent. Both work like `app.eager()`: calls are encoded, decoded and traced as by a
worker, in the thread that runs them. The checks of a worker before a run are made here too: revoked or
expired calls end without running.

Without a clock nothing waits: countdowns and retries are due at once. With `umbel_clock` a call waits until
the clock has been moved to its time. Due calls run in the order of their times, and at the same time in the
order of sending. Rate limits and priorities have no effect.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from umbel.app.app import App
from umbel.app.results import AsyncResult
from umbel.app.running.eager import EagerBackend, EagerRunner
from umbel.app.task import Task
from umbel.backends.interface import Take
from umbel.clock import cluster_now
from umbel.errors import ResultTimeout, TaskError, TaskRevoked, WireError
from umbel.launch.project import NativeProject
from umbel.pools.interface import Outcome
from umbel.protocol.delivery.delivery import Refusal
from umbel.protocol.delivery.states import FAILURE, REVOKED
from umbel.wire.call import TaskCall, decode_task
from umbel.wire.message import Outgoing, StoredResult, parse_instant
from umbel.wire.records import Revoke
from umbel.wire.show import show_value
from umbel.wire.steps import step_map
from umbel.wire.values import SERIALIZERS, decode_json, encode_json

# ---- calls -----------------------------------------------------------------------------------------

VALUE_MAX_CHARS = 200


@dataclass(eq=False)
class SentCall:
    """One call that was sent, as a worker receives it.

    `ended`: how it ended (`success`, `failure`, `retry`, ...); "" if it has not run.
    """

    app: App
    outgoing: Outgoing
    number: int  # in the order of sending
    returns: int = 0  # how often the task has requeued it
    ended: str = field(default="", init=False)
    error: str = field(default="", init=False)  # if it failed

    @cached_property
    def _call(self) -> TaskCall:
        return decode_task(self.outgoing.message, accept=tuple(SERIALIZERS))

    @property
    def task(self) -> str:
        """The task's name."""
        return self._call.headers.task

    @property
    def id(self) -> str:
        """The task's id."""
        return self._call.headers.id

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments as a worker decodes them: a tuple in JSON becomes a list."""
        return tuple(self._call.args)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments as a worker decodes them."""
        return self._call.kwargs

    @property
    def queue(self) -> str:
        """The queue it was sent to."""
        return self.outgoing.queue

    @property
    def priority(self) -> int:
        """Its priority, from 0 to 9."""
        return self.outgoing.message.priority

    @property
    def retries(self) -> int:
        """Which attempt it is: 0 for the first."""
        return self._call.headers.retries

    @property
    def eta(self) -> datetime | None:
        """The time at which it is due; None if it is due at once."""
        return _moment(self.outgoing.not_before) if self.outgoing.not_before else None

    @property
    def expires(self) -> datetime | None:
        """The time after which it must not run; None if it does not expire."""
        at = self._call.headers.expires
        return None if at is None else _moment(parse_instant(at))

    @property
    def headers(self) -> Mapping[str, Any]:
        """Headers that the caller passed to `apply_async(headers=...)`."""
        return self._call.extra

    @property
    def then(self) -> list[str]:
        """Names of the tasks that follow it in the chain, in order."""
        return [step_map(step)["task"] for step in reversed(self._call.embed.chain or ())]

    @property
    def unique_key(self) -> str | None:
        """The key of a unique task; None for others."""
        key = self._call.headers.umbel_unique
        return key if isinstance(key, str) else None

    @cached_property
    def result(self) -> AsyncResult[Any]:
        """The result, available once the call has run."""
        task = self.app.find_task(self.task)
        return AsyncResult(self.id, app=self.app, types=None if task is None else task.options.types)

    def is_of(self, task: "Task[Any, Any] | str") -> bool:
        """Whether it is a call of this task, given as task or name."""
        return self.task == name_of(task)

    def matches(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it was called with these arguments, by position or by name."""
        sent, wanted = self._bound(self.args, self.kwargs), self._bound(args, kwargs)
        return sent.keys() == wanted.keys() and all(_alike(sent[name], wanted[name]) for name in sent)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
        """The arguments by the names of the function's parameters, if the function is known here."""
        task = self.app.find_task(self.task)
        try:
            bound = None if task is None else inspect.signature(task.run).bind(*args, **kwargs)
        except TypeError:
            bound = None
        if bound is None:
            return {**dict(enumerate(args)), **kwargs}
        bound.apply_defaults()
        return dict(bound.arguments)

    def __repr__(self) -> str:
        task, args, kwargs = self.app.find_task(self.task), self._call.args, self.kwargs
        if task is not None and task.options.hides is not None:
            args, kwargs = task.options.hides.hide(args, kwargs)
        shown = [show_value(value, VALUE_MAX_CHARS) for value in args]
        shown += [f"{name}={show_value(value, VALUE_MAX_CHARS)}" for name, value in kwargs.items()]
        notes = [f"queue {self.queue}"] if self.queue != self.app.settings.task_default_queue else []
        notes += [f"due {self.eta:%Y-%m-%d %H:%M:%S}"] if self.eta else []
        notes += [f"retry {self.retries}"] if self.retries else []
        notes += [f"then {' | '.join(self.then)}"] if self.then else []
        notes += [self.ended] if self.ended else []
        return f"{self.task}({', '.join(shown)})" + (f" [{', '.join(notes)}]" if notes else "")


def name_of(task: "Task[Any, Any] | str") -> str:
    """The name of a task that is given as task or name."""
    return task if isinstance(task, str) else task.name


def _moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def _alike(sent: Any, wanted: Any) -> bool:
    """Whether two values are equal, directly or after encoding and decoding, which makes a tuple a list."""
    if sent == wanted:
        return True
    try:
        return bool(decode_json(encode_json(sent)) == decode_json(encode_json(wanted)))
    except (WireError, TypeError, ValueError):
        return False


# ---- stage -----------------------------------------------------------------------------------------

CALLS_MAX = 100_000  # in one test
RUNS_MAX = 10_000  # in one run of calls, which would never end if a task sends itself


class Stage(EagerRunner):
    """Holds and runs the calls of one test. With `at_once`, due calls run when they are sent.

    `how` is a hint for error messages: how a test runs a waiting call.
    """

    def __init__(self, app: App, *, at_once: bool, how: str) -> None:
        super().__init__(app, StagedResults(self))
        self.how = how
        self.has_clock = False  # then calls wait until they are due
        self.calls: list[SentCall] = []
        self._waiting: dict[int, SentCall] = {}
        self._running: dict[int, SentCall] = {}
        self._app = app
        self._at_once = at_once
        self._revoked: set[str] = set()
        self._leave = NativeProject(app).end_without_running()
        self._sent = count(1)

    # -- for the app -----------------------------------------------------------------------------

    def run(self, batch: Iterable[Outgoing]) -> None:
        """Take the messages that the app sends; with `at_once`, run due calls."""
        sent = [self._taken(outgoing) for outgoing in batch]
        if self._at_once:
            self._work([call for call in sent if self.is_due(call)], self.is_due)

    def revoke(self, revokes: Iterable[Revoke]) -> None:
        """Revoke tasks, or undo revokes."""
        for entry in revokes:
            if entry.expires_at > cluster_now():
                self._revoked.add(entry.task_id)
            else:  # an expired revoke undoes an earlier one
                self._revoked.discard(entry.task_id)

    # -- for the test ----------------------------------------------------------------------------

    def is_due(self, call: SentCall) -> bool:
        """Whether the time of a call has come, by the test's clock if there is one."""
        return not self.has_clock or call.outgoing.not_before <= cluster_now()

    @property
    def waiting(self) -> list[SentCall]:
        """Calls that were sent and have not run, in the order of sending."""
        return list(self._waiting.values())

    @property
    def unended(self) -> list[SentCall]:
        """Calls that are running or waiting."""
        return [*self._running.values(), *self._waiting.values()]

    def next_due(self) -> float | None:
        """The earliest time of the calls that this stage runs by itself; None if there is none."""
        if not self._at_once or not self.has_clock:
            return None
        return min((call.outgoing.not_before for call in self.waiting), default=None)

    def catch_up(self) -> None:
        """Run calls that have become due, after the clock was moved."""
        if self._at_once:
            self.run_waiting(self.is_due)

    def run_waiting(self, chosen: Callable[[SentCall], bool]) -> list[SentCall]:
        """Run the chosen calls, and chosen calls that these send; return all that ran."""
        return self._work([call for call in self.waiting if chosen(call)], chosen)

    def run_first(self, chosen: Callable[[SentCall], bool]) -> SentCall | None:
        """Run the first of the chosen calls, and nothing else; None if there is none."""
        todo = [(call.outgoing.not_before, call.number) for call in self.waiting if chosen(call)]
        call = self._waiting.pop(min(todo)[1]) if todo else None
        if call is not None:
            self.run_call(call)
        return call

    def run_call(self, call: SentCall) -> list[SentCall]:
        """Run a call, and return the calls that it causes and that have not run."""
        sent_before = len(self.calls)
        why = self._refusal(call)
        if why is not None:
            return self._end(call, why)
        self._running[call.number] = call
        outcome = self.run_one(call.outgoing)
        del self._running[call.number]
        call.ended = outcome.kind
        call.error = _error_text(outcome)
        follow_ups = [self._taken(follow_up) for follow_up in outcome.follow_ups]
        if self.comes_back(outcome, call.returns):
            follow_ups.append(self._taken(call.outgoing, call.returns + 1))
        # With `at_once`, calls that the task itself sent have already run.
        return follow_ups if self._at_once else self.calls[sent_before:]

    def forget(self) -> None:
        """Forget all calls."""
        self.calls.clear()
        self._waiting.clear()

    def _taken(self, outgoing: Outgoing, returns: int = 0) -> SentCall:
        call = SentCall(self._app, outgoing, next(self._sent), returns)
        if len(self.calls) >= CALLS_MAX:
            raise RuntimeError(
                f"{CALLS_MAX} calls were sent in one test, which is the limit; the last is {call}"
            )
        self.calls.append(call)
        self._waiting[call.number] = call
        return call

    def _work(self, first: list[SentCall], chosen: Callable[[SentCall], bool]) -> list[SentCall]:
        ran: list[SentCall] = []
        todo = [(call.outgoing.not_before, call.number) for call in first]
        heapify(todo)
        while todo:
            call = self._waiting.pop(heappop(todo)[1], None)
            if call is None:  # another thread runs it
                continue
            if len(ran) >= RUNS_MAX:
                raise RuntimeError(f"{RUNS_MAX} calls ran, and more wait, next {call}: does it send itself?")
            for follow_up in self.run_call(call):
                if chosen(follow_up):
                    heappush(todo, (follow_up.outgoing.not_before, follow_up.number))
            ran.append(call)
        return ran

    def _refusal(self, call: SentCall) -> Refusal | None:
        if call.id in self._revoked:
            return Refusal.REVOKED
        expires = call.expires
        return Refusal.EXPIRED if expires is not None and cluster_now() > expires.timestamp() else None

    def _end(self, call: SentCall, why: Refusal) -> list[SentCall]:
        """End a call without running it, as a worker does; return the calls that this causes."""
        call.ended = why.value
        ending = self._leave(call.outgoing.message, call.queue, TaskRevoked(why.value), REVOKED)
        endings = [ending] if ending.before is None else [ending, ending.before()]
        for part in endings:
            self.backend.store(part.results)
        return [self._taken(follow_up) for part in endings for follow_up in part.follow_ups]


class StagedResults(EagerBackend):
    """Results of the calls that ran on the stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def unique_holder(self, key: str) -> str | None:
        """The id of the call that holds a unique key; None if it is free."""
        return next((call.id for call in self._stage.unended if call.unique_key == key), None)

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Return results without waiting. ResultTimeout: a call has not run, and nothing else would run
        it.
        """
        wanted = list(task_ids)
        found = super().wait(wanted, timeout_s, take)
        waiting = next((call for call in self._stage.waiting if call.id in wanted), None)
        if waiting is not None and not found:
            raise ResultTimeout(f"no result yet: {waiting} was sent but has not run; {self._stage.how}")
        return found


def _error_text(outcome: Outcome) -> str:
    if outcome.kind not in ("failure", "rejected"):
        return ""
    return f"{outcome.summary}\n{outcome.traceback}".strip()


# ---- inbox -----------------------------------------------------------------------------------------

SHOWN_MAX = 20

AnyTask = Task[Any, Any] | str


class Inbox:
    """The calls that wait, in the order of sending: `len(inbox)`, `inbox[0]`, `for call in inbox`.

    It collects all calls that tasks, signatures and `send_task` of the app send, from any thread and from
    async code. Nothing runs before `run`.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __len__(self) -> int:
        return len(self._stage.waiting)

    def __iter__(self) -> Iterator[SentCall]:
        return iter(self._stage.waiting)

    def __getitem__(self, place: int) -> SentCall:
        return self._stage.waiting[place]

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task | str) and bool(self.of(task))

    def of(self, task: AnyTask) -> list[SentCall]:
        """The waiting calls of one task."""
        return [call for call in self._stage.waiting if call.is_of(task)]

    @property
    def sent(self) -> list[SentCall]:
        """All calls that were sent, run or not."""
        return list(self._stage.calls)

    # -- assertions ------------------------------------------------------------------------------

    def assert_sent(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> SentCall:
        """Assert that the task was sent, with these arguments if any are given; return the first such call.

        `unittest.mock.ANY` matches any value. Calls that have run count too.
        """
        __tracebackhide__ = True
        return self._matching(task, args, kwargs)[0]

    def assert_sent_once(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> SentCall:
        """Assert that the task was sent once, with these arguments if any are given. Retries do not count."""
        __tracebackhide__ = True
        found = self._matching(task, args, kwargs)
        first = [call for call in found if not call.retries] or found
        if len(first) > 1:
            raise AssertionError(
                f"{_call(task, args, kwargs)} was sent {len(first)} times, not once:\n{_listed(first)}"
            )
        return first[0]

    def assert_not_sent(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> None:
        """Assert that the task was not sent; if arguments are given, not with these."""
        __tracebackhide__ = True
        found = self._found(task, args, kwargs)
        if found:
            raise AssertionError(
                f"{_call(task, args, kwargs)} was sent, against what the test expects:\n{_listed(found)}"
            )

    def assert_empty(self) -> None:
        """Assert that no call waits to be run."""
        __tracebackhide__ = True
        if waiting := self._stage.waiting:
            raise AssertionError(
                f"umbel_inbox is not empty, {len(waiting)} calls have not run:\n{_listed(waiting)}"
            )

    # -- running ---------------------------------------------------------------------------------

    def run(self, *tasks: AnyTask, propagate: bool = True) -> list[SentCall]:
        """Run due calls, and those that they send, until no call is due; return the calls that ran.

        With `tasks`, only calls of these tasks run. If a call failed, its exception is raised after all have
        run, unless `propagate` is false. Then the results of the calls are available.
        """
        ran = self._stage.run_waiting(self._chosen(tasks))
        if propagate:
            _raise_first(ran)
        return ran

    async def arun(self, *tasks: AnyTask, propagate: bool = True) -> list[SentCall]:
        """The same as `run`, in a thread, so that the tasks do not block the event loop of the test."""
        return await asyncio.to_thread(self.run, *tasks, propagate=propagate)

    def run_next(self, *tasks: AnyTask, propagate: bool = True) -> SentCall:
        """Run the first due call, but no call that it sends; AssertionError if no call is due."""
        ran = self._stage.run_first(self._chosen(tasks))
        if ran is None:
            raise AssertionError(
                "umbel_inbox.run_next(): no task that the test sent is due; send one first, or move the time "
                f"with umbel_clock; not run yet:\n{_listed(self._stage.waiting)}"
            )
        if propagate:
            _raise_first([ran])
        return ran

    def clear(self) -> None:
        """Forget all calls."""
        self._stage.forget()

    def __repr__(self) -> str:
        return f"<umbel_inbox with {len(self)} calls>\n{_listed(self._stage.waiting)}"

    def _chosen(self, tasks: tuple[AnyTask, ...]) -> Callable[[SentCall], bool]:
        names = {name_of(task) for task in tasks}
        return lambda call: self._stage.is_due(call) and (not names or call.task in names)

    def _found(self, task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SentCall]:
        of_task = [call for call in self._stage.calls if call.is_of(task)]
        if not args and not kwargs:
            return of_task
        return [call for call in of_task if call.matches(args, kwargs)]

    def _matching(self, task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SentCall]:
        __tracebackhide__ = True
        found = self._found(task, args, kwargs)
        if not found:
            raise AssertionError(f"{_call(task, args, kwargs)} was not sent; {self._instead(task)}")
        return found

    def _instead(self, task: AnyTask) -> str:
        others = [call for call in self._stage.calls if call.is_of(task)]
        if others:
            return f"with other arguments:\n{_listed(others)}"
        if self._stage.calls:
            return f"other tasks were:\n{_listed(self._stage.calls)}"
        return "nothing was"


def _call(task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if not args and not kwargs:
        return name_of(task)
    shown = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{name_of(task)}({', '.join(shown)})"


def _listed(calls: list[SentCall]) -> str:
    lines = [f"  {call!r}" for call in calls[:SHOWN_MAX]]
    if len(calls) > SHOWN_MAX:
        lines.append(f"  and {len(calls) - SHOWN_MAX} more")
    return "\n".join(lines) or "  nothing"


def _raise_first(ran: list[SentCall]) -> None:
    for call in ran:
        if not call.error:
            continue
        if call.result.state == FAILURE:
            call.result.get()
        raise TaskError(f"{call!r}: {call.error}")  # no result of it is stored
