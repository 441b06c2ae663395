"""SendOptions: what a call may say beside its arguments, checked where it is written."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from umbel.errors import nearest
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
    chain: list[SignatureMap]
    chord: SignatureMap
    stamped_headers: list[str]
    stamps: dict[str, Any]
    unique_for: float
    unique_key: str
    unique_token: str  # the key that is held already; for the task's further attempts


_TEXT, _NUMBER, _WHOLE, _MOMENT = (str,), (int, float), (int,), (datetime, str, int, float)
# What each option must be; None is always "not given". A header of the wrong type would be
# refused by every worker, so it is refused here, where it was written.
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("countdown", "time_limit", "soft_time_limit", "unique_for"), _NUMBER),
    **dict.fromkeys(("eta", "expires"), _MOMENT),
    **dict.fromkeys(("retries", "group_index"), _WHOLE),
    **dict.fromkeys(("headers", "stamps"), (Mapping,)),
    **dict.fromkeys(("chain", "stamped_headers"), (list, tuple)),
    **dict.fromkeys(("link", "link_error", "chord", "priority"), (object,)),  # judged where they are read
    "ignore_result": (bool,),
}
_KINDS = {name: _KINDS.get(name, _TEXT) for name in SendOptions.__annotations__}
_OPTION_NAMES = frozenset(_KINDS)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option nobody knows, or of the wrong type; the names of stamps count as known."""
    for name, value in options.items():
        kinds = _KINDS.get(name)
        if kinds is None:
            _refuse_unknown(name, options)
        elif value is not None and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"option {name!r} for sending a task is {value!r}; it must be {wanted}")


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
