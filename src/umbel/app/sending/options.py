"""SendOptions: what a call may say beside its arguments, checked where it is written."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

from umbel.app.options import checked_priority
from umbel.errors import nearest
from umbel.wire.options import broken_rule
from umbel.wire.show import brief
from umbel.wire.steps import Step
from umbel.wire.task import SignatureMap


class SendOptions(TypedDict, total=False):
    """What `apply_async` and `Signature.set` take."""

    task_id: str
    countdown: float
    eta: datetime | str | float
    expires: datetime | str | float
    queue: str
    routing_key: str
    exchange: str
    priority: int
    headers: Mapping[str, Any]
    retries: int
    link: Any
    link_error: Any
    serializer: str
    compression: str
    time_limit: float
    soft_time_limit: float
    ignore_result: bool
    shadow: str
    reply_to: str
    root_id: str
    parent_id: str
    group_id: str
    group_index: int
    chain: Sequence[Step]
    chord: SignatureMap
    stamped_headers: list[str]
    stamps: dict[str, Any]
    replaced_task_nesting: int
    unique_for: float
    unique_key: str
    unique_token: str  # the key that is already taken; for the task's further attempts


_OPTION_NAMES = frozenset(SendOptions.__annotations__)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that is unknown, of the wrong type or out of bounds; the names of stamps are known.

    Every worker would refuse such a header, so it is refused here, where it was written.
    """
    for name, value in options.items():
        if name not in _OPTION_NAMES:
            _refuse_unknown(name, options)
        elif name == "priority":
            checked_priority(value)
        elif (rule := broken_rule(name, value)) is not None:
            kind = ValueError if isinstance(value, rule.kinds) and type(value) is not bool else TypeError
            raise kind(f"option {name!r} for sending a task is {brief(value)}; it must be {rule.wanted}")


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a signature that came from elsewhere: what only its sender knows is left out."""
    known = _OPTION_NAMES.union(options.get("stamped_headers") or ())
    return {name: value for name, value in options.items() if name in known}


def _refuse_unknown(name: str, options: Mapping[str, Any]) -> None:
    if name in (options.get("stamped_headers") or ()):
        return
    near = nearest(name, sorted(_OPTION_NAMES))
    hint = f"; did you mean {near!r}?" if near else ""
    raise TypeError(f"unknown option {name!r} for sending a task{hint}")
