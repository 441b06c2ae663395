"""Options: what a call may state beside its arguments, and within which bounds.

The same rules hold for a client that sends a call and for the signatures that a message carries:
callbacks, the next steps of a chain, the body of a chord. A signature with an option that cannot be
sent is found before its task runs, not when it has run.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from umbel.errors import WireError
from umbel.wire.instant import EARLIEST_S, LATEST_S, parse_instant
from umbel.wire.limits import (
    COUNT_MAX,
    DELAY_MAX_S,
    NAME_MAX_BYTES,
    PRIORITY_MAX,
    TASK_MAX_CHARS,
    TIME_LIMIT_MAX_S,
    is_name,
)


class Rule(NamedTuple):
    """`wanted` completes the sentence "it must be ..."."""

    kinds: tuple[type, ...]
    wanted: str
    is_within: Callable[[Any], bool] = lambda _: True


def broken_rule(name: str, value: object) -> Rule | None:
    """The rule that this value of the option breaks; None if it keeps it, or there is none.

    None is always "not given", and a truth value is never a number.
    """
    rule = RULES.get(name)
    if rule is None or value is None:
        return None
    if not isinstance(value, rule.kinds) or (type(value) is bool and rule.kinds is not _TRUTH):
        return rule
    return None if rule.is_within(value) else rule


def is_moment(value: datetime | str | float) -> bool:
    """Whether dates can say it: as a datetime, as ISO 8601 text, or in Unix seconds."""
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, str):
        try:
            parse_instant(value)
        except WireError:
            return False
        return True
    return EARLIEST_S <= value <= LATEST_S + 1


def is_task_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= TASK_MAX_CHARS
        and is_name(name, max_bytes=4 * TASK_MAX_CHARS)
    )


def _is_id(value: str) -> bool:
    return value != "" and is_name(value)


def _is_expiry(value: datetime | str | float) -> bool:
    return -DELAY_MAX_S <= value <= DELAY_MAX_S if isinstance(value, int | float) else is_moment(value)


def _are_names(values: Any) -> bool:
    return all(isinstance(one, str) and is_name(one) for one in values)


_TRUTH: tuple[type, ...] = (bool,)
_NUMBER: tuple[type, ...] = (int, float)
_ANY: tuple[type, ...] = (object,)
_ID = Rule((str,), f"text of 1 to {NAME_MAX_BYTES} bytes without NUL", _is_id)
_NAME = Rule((str,), f"text of at most {NAME_MAX_BYTES} bytes without NUL", is_name)
_COUNT = Rule((int,), f"int, from 0 to {COUNT_MAX}", lambda value: 0 <= value <= COUNT_MAX)
_LIMIT = Rule(
    _NUMBER,
    f"int or float, in seconds, above 0 and at most {TIME_LIMIT_MAX_S} (ten years)",
    lambda value: 0 < value <= TIME_LIMIT_MAX_S,
)
_TEXT = Rule((str,), "str")

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("task_id", "root_id", "parent_id", "group_id", "unique_token"), _ID),
    **dict.fromkeys(("queue", "routing_key", "exchange", "reply_to"), _NAME),
    **dict.fromkeys(("retries", "group_index", "replaced_task_nesting"), _COUNT),
    **dict.fromkeys(("time_limit", "soft_time_limit"), _LIMIT),
    **dict.fromkeys(("serializer", "compression", "unique_key"), _TEXT),
    **dict.fromkeys(("link", "link_error", "chord"), Rule(_ANY, "")),  # judged where they are read
    "unique_for": Rule(_NUMBER, "int or float, in seconds, above 0", lambda value: value > 0),
    "shadow": Rule((str,), f"text of 1 to {TASK_MAX_CHARS} characters without NUL", is_task_name),
    "countdown": Rule(
        _NUMBER,
        f"int or float, in seconds, at most {DELAY_MAX_S} (a hundred years)",
        lambda value: -DELAY_MAX_S <= value <= DELAY_MAX_S,
    ),
    "eta": Rule(
        (datetime, str, int, float), "datetime, ISO 8601 text or Unix seconds, up to the year 9999", is_moment
    ),
    "expires": Rule(
        (datetime, str, int, float),
        "datetime or ISO 8601 text up to the year 9999, or a number of seconds, at most a hundred years",
        _is_expiry,
    ),
    "priority": Rule((int,), f"int, from 0 to {PRIORITY_MAX}", lambda value: 0 <= value <= PRIORITY_MAX),
    "headers": Rule((Mapping,), f"Mapping, with names of at most {NAME_MAX_BYTES} bytes", _are_names),
    "stamps": Rule((Mapping,), f"Mapping, with names of at most {NAME_MAX_BYTES} bytes", _are_names),
    "chain": Rule((list, tuple), "list or tuple"),
    "stamped_headers": Rule(
        (list, tuple, set), f"list of names of at most {NAME_MAX_BYTES} bytes", _are_names
    ),
    "ignore_result": Rule(_TRUTH, "bool"),
}
