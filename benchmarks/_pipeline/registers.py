"""Registers: what is known of a task by one type of event, for engines that join events by columns."""

from collections.abc import Mapping

from umbel.events.types import TASK_TYPES, TaskCustom, fields_of

ORDER = ("attempt", "clock", "timestamp", "hostname", "pid", "digest")
"""The total order of a task's events: a register's fields begin with it, so its maximum is the merge's."""

_ENVELOPE = frozenset(fields_of(TaskCustom))
PAYLOADS: Mapping[str, tuple[str, ...]] = {
    **{one.slot: tuple(name for name in fields_of(one) if name not in _ENVELOPE) for one in TASK_TYPES},
    TaskCustom.slot: ("type",),
}
"""What each register keeps beside its key, its attempt as reported, and `extra`."""


def register_fields(slot: str) -> tuple[str, ...]:
    return (*ORDER, "retries", "extra", *PAYLOADS[slot])
