"""Filters: which tasks are wanted, judged on what is kept of each before a record is made of it."""

import re
from collections.abc import Callable

from umbel.events.state import Tracked
from umbel.events.types import TaskReceived, TaskSent
from umbel.events.view import seconds
from umbel.monitor.shapes import TaskFilter
from umbel.protocol.delivery.sensitive import Hides, hides_nothing, is_open

Admits = Callable[[Tracked], bool]
Redact = Callable[[str], str]


def admits_of(wanted: TaskFilter, redact: Redact, hides: Hides = hides_nothing) -> Admits | None:
    """What is to be asked of each task; None: all are wanted. Name and worker have indices of their own.

    What `redact` takes out of a text is not found either, nor what nobody masked of a task that `hides`.
    """
    checks = [check for check in (_state(wanted), _queue(wanted), _root(wanted), _time(wanted)) if check]
    if wanted.text:
        checks.append(_text(wanted.text, redact, hides))
    if not checks:
        return None
    return checks[0] if len(checks) == 1 else lambda task: all(check(task) for check in checks)


def _state(wanted: TaskFilter) -> Admits | None:
    states = frozenset(one.strip().upper() for one in wanted.state.split(",") if one.strip())
    return (lambda task: task.counted in states) if states else None


def _queue(wanted: TaskFilter) -> Admits | None:
    queue = wanted.queue
    return (lambda task: task.sent is not None and task.sent.queue == queue) if queue else None


def _root(wanted: TaskFilter) -> Admits | None:
    root = wanted.root
    return (lambda task: task.uuid == root or root_of(task) == root) if root else None


def _time(wanted: TaskFilter) -> Admits | None:
    since, until = wanted.since, wanted.until
    if since is None and until is None:
        return None
    low, high = since if since is not None else float("-inf"), until if until is not None else float("inf")
    return lambda task: task.best is not None and low <= seconds(task.best.at_us) <= high


def _text(text: str, redact: Redact, hides: Hides) -> Admits:
    found = re.compile(re.escape(text), re.IGNORECASE).search
    named: dict[str | None, bool] = {None: False}  # names are few, and repeat

    def has(shown: str | None) -> bool:
        return bool(shown and found(shown) and found(redact(shown)))

    def is_shown(described: TaskReceived | TaskSent) -> bool:
        return not (hides(described.name) and is_open(described.args, described.kwargs))

    def is_in(task: Tracked) -> bool:
        name = task.name
        if name not in named:
            named[name] = found(name or "") is not None
        if named[name] or task.uuid.startswith(text):
            return True
        described = task.received if task.received is not None else task.sent
        if described is not None and (has(described.args) or has(described.kwargs)) and is_shown(described):
            return True
        return task.failed is not None and has(task.failed.exception)

    return is_in


def root_of(task: Tracked) -> str | None:
    for described in (task.received, task.sent):
        if described is not None and described.root_id is not None:
            return described.root_id
    return None
