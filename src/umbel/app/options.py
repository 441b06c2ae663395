"""TaskOptions: what `@app.task(...)` says about one task, checked when the task is defined."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypedDict

from umbel.errors import ConfigurationError
from umbel.protocol.rate import parse_rate
from umbel.protocol.retry import RetryPolicy

PRIORITY_MAX = 9


class TaskKeywords(TypedDict, total=False):
    """What `@app.task(...)` takes, beside `bind`."""

    name: str
    queue: str
    priority: int
    acks_late: bool
    acks_early: bool
    ignore_result: bool
    autoretry_for: tuple[type[BaseException], ...]
    max_retries: int | None
    default_retry_delay: float
    retry_backoff: bool | float
    retry_backoff_max: float
    retry_jitter: bool
    rate_limit: str | float | None
    time_limit: float
    soft_time_limit: float
    serializer: str
    track_started: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    bind: bool = False
    queue: str | None = None
    priority: int | None = None
    acks_early: bool | None = None
    ignore_result: bool | None = None
    autoretry_for: tuple[type[BaseException], ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rate_per_second: float = 0.0
    time_limit_s: float | None = None
    soft_time_limit_s: float | None = None
    serializer: str | None = None
    track_started: bool = False


def options_from(task: str, given: Mapping[str, Any], *, bind: bool) -> TaskOptions:
    _refuse_unknown(task, given)
    backoff = given.get("retry_backoff", False)
    return TaskOptions(
        bind=bind,
        queue=given.get("queue"),
        priority=checked_priority(given.get("priority")),
        acks_early=_acks_early(task, given.get("acks_late"), given.get("acks_early")),
        ignore_result=given.get("ignore_result"),
        autoretry_for=tuple(given.get("autoretry_for", ())),
        retry=RetryPolicy(
            max_retries=given.get("max_retries", 3),
            delay_s=given.get("default_retry_delay", 180.0),
            backoff_s=None if backoff is False else float(backoff),  # True is one second
            backoff_max_s=given.get("retry_backoff_max", 600.0),
            jitter=given.get("retry_jitter", True),
        ),
        rate_per_second=_rate(task, given.get("rate_limit")),
        time_limit_s=given.get("time_limit"),
        soft_time_limit_s=given.get("soft_time_limit"),
        serializer=given.get("serializer"),
        track_started=given.get("track_started", False),
    )


def checked_priority(priority: Any) -> Any:
    """The priority as given, None included; ValueError when there is no such priority."""
    if priority is None or (type(priority) is int and 0 <= priority <= PRIORITY_MAX):
        return priority
    raise ValueError(f"priority {priority!r} is not a whole number from 0 to {PRIORITY_MAX}")


def _refuse_unknown(task: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in TaskKeywords.__annotations__:
            near = get_close_matches(name, list(TaskKeywords.__annotations__), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown option {name!r} of task {task!r}{hint}")


def _acks_early(task: str, late: bool | None, early: bool | None) -> bool | None:
    """Two names for one choice: late is the default, early the option."""
    if late is not None and early is not None and late == early:
        raise ConfigurationError(
            f"task {task!r} asks for acks_late={late} and acks_early={early}; give one of them"
        )
    return early if late is None else not late


def _rate(task: str, limit: str | float | None) -> float:
    try:
        return parse_rate(limit) if limit is not None else 0.0
    except ValueError as error:
        raise ConfigurationError(f"rate_limit of task {task!r}: {error}") from None
