"""SentCall: one call of a task as it was sent, for assertions. It shows what a worker will be given."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from umbel.app.app import App
from umbel.app.results import AsyncResult
from umbel.app.task import Task
from umbel.errors import WireError
from umbel.wire.instant import parse_instant
from umbel.wire.message import Outgoing
from umbel.wire.show import show_value
from umbel.wire.steps import step_map
from umbel.wire.task import TaskCall, decode_task
from umbel.wire.values import SERIALIZERS, decode_json, encode_json

VALUE_MAX_CHARS = 200


@dataclass(eq=False)
class SentCall:
    """One call that was sent. `ended` says how: `success`, `failure`, `retry`, ...; "": it has not run."""

    app: App
    outgoing: Outgoing
    number: int  # in the order of sending
    returns: int = 0  # how often the task gave it back
    ended: str = field(default="", init=False)
    error: str = field(default="", init=False)  # of one that failed

    @cached_property
    def _call(self) -> TaskCall:
        return decode_task(self.outgoing.message, accept=tuple(SERIALIZERS))

    @property
    def task(self) -> str:
        """The task's name."""
        return self._call.headers.task

    @property
    def id(self) -> str:
        return self._call.headers.id

    @property
    def args(self) -> tuple[Any, ...]:
        """As the worker decodes them: of a tuple in JSON, a list."""
        return tuple(self._call.args)

    @property
    def kwargs(self) -> dict[str, Any]:
        return self._call.kwargs

    @property
    def queue(self) -> str:
        return self.outgoing.queue

    @property
    def priority(self) -> int:
        return self.outgoing.message.priority

    @property
    def retries(self) -> int:
        """Which attempt it is: 0 for the first."""
        return self._call.headers.retries

    @property
    def eta(self) -> datetime | None:
        """When it is due; None: at once."""
        return _moment(self.outgoing.not_before) if self.outgoing.not_before else None

    @property
    def expires(self) -> datetime | None:
        at = self._call.headers.expires
        return None if at is None else _moment(parse_instant(at))

    @property
    def headers(self) -> Mapping[str, Any]:
        """The caller's own, from `apply_async(headers=...)`."""
        return self._call.extra

    @property
    def then(self) -> list[str]:
        """The tasks of the chain that follow it, in order."""
        return [step_map(step)["task"] for step in reversed(self._call.embed.chain or ())]

    @property
    def unique_key(self) -> str | None:
        key = self._call.headers.umbel_unique
        return key if isinstance(key, str) else None

    @cached_property
    def result(self) -> AsyncResult[Any]:
        task = self.app.find_task(self.task)
        return AsyncResult(self.id, app=self.app, types=None if task is None else task.options.types)

    def is_of(self, task: "Task[Any, Any] | str") -> bool:
        return self.task == name_of(task)

    def matches(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it was called with these arguments, by position or by name."""
        sent, wanted = self._bound(self.args, self.kwargs), self._bound(args, kwargs)
        return sent.keys() == wanted.keys() and all(_alike(sent[one], wanted[one]) for one in sent)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
        """The arguments by the names of the function's parameters, where that is known here."""
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
        shown = [show_value(one, VALUE_MAX_CHARS) for one in args]
        shown += [f"{name}={show_value(one, VALUE_MAX_CHARS)}" for name, one in kwargs.items()]
        notes = [f"queue {self.queue}"] if self.queue != self.app.settings.task_default_queue else []
        notes += [f"due {self.eta:%Y-%m-%d %H:%M:%S}"] if self.eta else []
        notes += [f"retry {self.retries}"] if self.retries else []
        notes += [f"then {' | '.join(self.then)}"] if self.then else []
        notes += [self.ended] if self.ended else []
        return f"{self.task}({', '.join(shown)})" + (f" [{', '.join(notes)}]" if notes else "")


def name_of(task: "Task[Any, Any] | str") -> str:
    return task if isinstance(task, str) else task.name


def _moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def _alike(sent: Any, wanted: Any) -> bool:
    """Equal, or equal once it has made the same journey: a tuple arrives as a list."""
    if sent == wanted:
        return True
    try:
        return bool(decode_json(encode_json(sent)) == decode_json(encode_json(wanted)))
    except (WireError, TypeError, ValueError):
        return False
