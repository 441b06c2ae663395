"""Results: what is stored about a task that ran, in the map that Celery's clients read (wire 6.1)."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from umbel import errors
from umbel.errors import BadValue
from umbel.protocol.delivery.states import FAILURE, SUCCESS
from umbel.text import leaving
from umbel.wire.message import DEFAULT_LIMITS, Limits, StoredResult, format_instant, too_large
from umbel.wire.show import attempt, show_value
from umbel.wire.values import decode_json_as, encode_json

Child = str | tuple[str, str | None]
"""A task sent while this one ran: its id, or its id and its parent's id."""


# Umbel's errors that Celery has too are stored under Celery's names, so that both kinds of clients get a
# class that they know.
CELERY_ERRORS: Mapping[type[BaseException], tuple[str, str]] = {
    errors.NotRegistered: ("celery.exceptions", "NotRegistered"),
    errors.TaskRevoked: ("celery.exceptions", "TaskRevokedError"),
    errors.MaxRetriesExceeded: ("celery.exceptions", "MaxRetriesExceededError"),
    errors.ChordError: ("celery.exceptions", "ChordError"),
    errors.Retry: ("celery.exceptions", "Retry"),
    errors.WorkerLost: ("billiard.exceptions", "WorkerLostError"),
    errors.TimeLimitExceeded: ("billiard.exceptions", "TimeLimitExceeded"),
    errors.SoftTimeLimitExceeded: ("billiard.exceptions", "SoftTimeLimitExceeded"),
}


class ExceptionMap(TypedDict):
    """The stored form of an exception."""

    exc_type: str
    exc_message: list[Any]
    exc_module: str


class ResultMap(msgspec.Struct, frozen=True):
    """A decoded result. `date_done` is None until the task is ready."""

    status: str
    task_id: str
    result: Any = None
    traceback: str | None = None
    children: list[Any] | None = None
    date_done: str | None = None
    group_id: str | None = None
    parent_id: str | None = None


def encode_success(
    task_id: str,
    value: object,
    *,
    done_at: float,
    children: Sequence[Child] = (),
    group_id: str | None = None,
    parent_id: str | None = None,
    extended: Mapping[str, Any] | None = None,
) -> StoredResult:
    """Encode a return value; raise BadValue if it cannot be sent, which makes the task a failure."""
    return _encode(task_id, SUCCESS, value, None, done_at, children, group_id, parent_id, extended)


def encode_failure(
    task_id: str,
    error: ExceptionMap,
    traceback: str | None,
    *,
    status: str = FAILURE,
    done_at: float | None,
    children: Sequence[Child] = (),
    group_id: str | None = None,
    parent_id: str | None = None,
    extended: Mapping[str, Any] | None = None,
) -> StoredResult:
    """Encode how a task failed, was revoked, or (if `done_at` is None) why it is retried."""
    return _encode(task_id, status, error, traceback, done_at, children, group_id, parent_id, extended)


def encode_state(
    task_id: str,
    status: str,
    meta: object,
    *,
    done_at: float | None = None,
    children: Sequence[Child] = (),
    group_id: str | None = None,
    parent_id: str | None = None,
    extended: Mapping[str, Any] | None = None,
) -> StoredResult:
    """Encode an intermediate state: STARTED with pid and hostname, or one that the task set."""
    return _encode(task_id, status, meta, None, done_at, children, group_id, parent_id, extended)


def exception_map(exc: BaseException) -> ExceptionMap:
    """Describe an exception in a form that can always be stored: values that cannot be sent become text."""
    # Not exc.args, because a subclass may have redefined that name.
    args: tuple[object, ...] = _ARGS.__get__(exc)
    kind = type(exc)
    if kind is errors.WrongType:  # a class that every client knows
        kind = TypeError
    module, name = CELERY_ERRORS.get(kind) or (kind.__module__, kind.__qualname__)
    return {
        "exc_type": leaving(str(name)),
        "exc_message": [_sendable(arg) for arg in args],
        "exc_module": leaving(str(module)),  # a class may have any value here
    }


def decode_result(payload: bytes, *, limits: Limits = DEFAULT_LIMITS) -> ResultMap:
    """Read a stored result. Raises WireError."""
    return decode_json_as(_RESULT, payload, what="the result", limits=limits)


class _Written(msgspec.Struct, frozen=True):
    """The map in Celery's order, without values that are not set."""

    status: str
    result: msgspec.Raw
    traceback: str | None
    children: list[Any]
    date_done: str | None
    task_id: str
    group_id: str | msgspec.UnsetType
    parent_id: str | msgspec.UnsetType


# The type checker sees a tuple; on the class it is the descriptor.
_ARGS: Any = BaseException.args
_RESULT = msgspec.json.Decoder(ResultMap)
_to_json = msgspec.json.Encoder().encode


def _encode(
    task_id: str,
    status: str,
    value: object,
    traceback: str | None,
    done_at: float | None,
    children: Sequence[Child],
    group_id: str | None,
    parent_id: str | None,
    extended: Mapping[str, Any] | None,
) -> StoredResult:
    written = _Written(
        status,
        msgspec.Raw(encode_json(value, root="result", limits=_INSIDE_RESULT)),
        None if traceback is None else leaving(traceback),
        [_child(child) for child in children],
        None if done_at is None else format_instant(done_at),
        task_id,
        msgspec.UNSET if group_id is None else group_id,
        msgspec.UNSET if parent_id is None else parent_id,
    )
    try:
        payload = _to_json(written)
    except UnicodeEncodeError as error:
        raise BadValue(
            f"the result of task {task_id!r} cannot be stored: the name of its state, or the id of the task, "
            f"its parent, group or child, is not valid Unicode: {error}; choose another name or id"
        ) from error
    if extended:
        payload = payload[:-1] + b"," + encode_json(dict(extended), root="extended")[1:]
    if len(payload) > DEFAULT_LIMITS.size_max_bytes:
        raise too_large(
            "the result", len(payload), DEFAULT_LIMITS, "; return a reference to the data instead"
        )
    return StoredResult(task_id, status, payload)


# The value is nested one level deep.
_INSIDE_RESULT = Limits(depth_max=DEFAULT_LIMITS.depth_max - 1)


def _child(child: Child) -> list[Any]:
    child_id, parent = (child, None) if isinstance(child, str) else child
    return [[child_id, parent], None]


def _sendable(value: object) -> object:
    # A value of a user's class can raise anything while it is encoded.
    plain = leaving(value) if isinstance(value, str) else value
    return attempt(_checked, plain, lambda _: show_value(plain))


def _checked(value: object) -> object:
    # It is nested three levels deep in the result map; one more level is reserved.
    encode_json(value, limits=_EXCEPTION_LIMITS)
    return value


_EXCEPTION_LIMITS = Limits(size_max_bytes=1024 * 1024, depth_max=DEFAULT_LIMITS.depth_max - 4)
