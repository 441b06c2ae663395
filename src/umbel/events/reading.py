"""Reading: an event as it came over the wire becomes a record of `types.py`.

Whatever a peer sent, reading it does not fail: a field that has not the type it should have goes to
`extra`, a clock or time that no honest sender has counts as 0, and what is no event at all (no
type, a task event that names no task) is None, for the caller to count.

A reader remembers what senders repeat (their names, the tasks' names, queues), so that a million
events share one text. It remembers so many and then starts over: that costs memory, no more.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from umbel.events.types import (
    KNOWN_TYPES,
    LOCAL_FIELDS,
    TASK_PREFIX,
    TASK_TYPES,
    Event,
    OtherEvent,
    TaskCustom,
    TaskEvent,
    TaskReceived,
    TaskSent,
    fields_of,
    tag_of,
)

SHARED_MAX = 20_000
EventT = TypeVar("EventT", bound=Event)


class HasId(Protocol):
    @property
    def uuid(self) -> str: ...


class EventReader:
    """`tasks`: those known already, whose ids are used again instead of copies of them."""

    def __init__(self, tasks: Mapping[str, HasId] | None = None) -> None:
        self._tasks: Mapping[str, HasId] = {} if tasks is None else tasks
        self._texts: dict[str, str] = {}

    def read(self, event: Mapping[str, Any]) -> Event | None:
        type_name = event.get("type")
        if type(type_name) is not str:
            return None
        task_type = _TASK_TYPES.get(type_name)
        if task_type is None:
            return self._read_other(event, type_name)
        try:
            record = msgspec.convert(event, task_type)
        except msgspec.ValidationError:
            loose = _read_loosely(event, task_type)
            if loose is None:
                return None
            record = loose
        self._settle_task(record)
        return record

    def _read_other(self, event: Mapping[str, Any], type_name: str) -> Event | None:
        """Events of workers, which are few, and those of unknown types."""
        if type_name.startswith(TASK_PREFIX):
            subject = type_name.removeprefix(TASK_PREFIX)
            custom = _read_loosely(event, TaskCustom, subject=subject) if subject else None
            if custom is not None:
                self._settle_task(custom)
            return custom
        record: Event | None
        known = KNOWN_TYPES.get(type_name)
        if known is None:
            record = _read_loosely(event, OtherEvent, told_type=type_name)
        else:
            record = _read_loosely(event, known)
        if record is not None:
            self._settle(record)
        return record

    def _settle(self, record: Event) -> None:
        """Make the record comparable, and small: texts that repeat are shared."""
        record.timestamp = round(record.timestamp * 1_000_000) / 1_000_000
        hostname = record.hostname
        record.hostname = self._texts.get(hostname) or self._remember(hostname)

    def _settle_task(self, record: TaskEvent) -> None:
        self._settle(record)
        known = self._tasks.get(record.uuid)
        if known is not None:
            record.uuid = known.uuid
        if type(record) is TaskReceived or type(record) is TaskSent:
            self._settle_description(record)

    def _settle_description(self, record: TaskReceived | TaskSent) -> None:
        texts, name = self._texts, record.name
        if name is not None:
            record.name = texts.get(name) or self._remember(name)
        if record.root_id == record.uuid:
            record.root_id = record.uuid
        if type(record) is TaskSent:
            record.clock = 0
            queue, exchange, key = record.queue, record.exchange, record.routing_key
            record.queue = queue and (texts.get(queue) or self._remember(queue))
            record.exchange = exchange and (texts.get(exchange) or self._remember(exchange))
            record.routing_key = key and (texts.get(key) or self._remember(key))

    def _remember(self, text: str) -> str:
        if len(self._texts) >= SHARED_MAX:
            self._texts.clear()
        return self._texts.setdefault(text, text)


def _read_loosely(event: Mapping[str, Any], record_type: type[EventT], **given: str) -> EventT | None:
    """Take what the record has fields for; the rest goes to `extra`, except what is a receiver's."""
    hints = _HINTS[record_type]
    taken = {name: value for name, value in event.items() if name in hints and value is not None}
    odd = {
        str(name): value
        for name, value in event.items()
        if name not in hints and value is not None and name not in _NO_EXTRA
    }
    try:
        record = msgspec.convert({"type": tag_of(record_type), **given, **taken}, record_type)
    except msgspec.ValidationError:
        right = {name: value for name, value in taken.items() if _is_right(value, hints[name])}
        if issubclass(record_type, TaskEvent) and "uuid" not in right:
            return None
        odd |= {name: taken[name] for name in taken.keys() - right.keys() - _ENVELOPE}
        record = msgspec.convert({"type": tag_of(record_type), **given, **right}, record_type)
    record.extra = odd or None
    return record


def _is_right(value: object, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


_TASK_TYPES = {tag_of(record): record for record in TASK_TYPES}
_ALL_TYPES: tuple[type[Event], ...] = (*KNOWN_TYPES.values(), TaskCustom, OtherEvent)
_HINTS: Mapping[type[Event], dict[str, Any]] = {record: fields_of(record) for record in _ALL_TYPES}
_ENVELOPE = frozenset(_HINTS[TaskCustom])
_NO_EXTRA = LOCAL_FIELDS | {"type"}
