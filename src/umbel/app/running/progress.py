"""Reports: custom states and events of a running task, limited in rate.

A task in a loop may report a thousand times a second, faster than anyone can read. So the first `BURST`
reports are sent at once, and `PER_SECOND` after that. Of the others only the latest state is retained. It is
sent with the next report, or before the task's result, so the last state always arrives. The cost: after a
flood of reports, the shown state is out of date until the task reports again.
"""

import logging
from collections.abc import Mapping
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from umbel.app.request import Request
from umbel.errors import BrokerError, WireError
from umbel.events.precedence import STATES
from umbel.events.types import KNOWN_TYPES, TASK_PREFIX
from umbel.pools.interface import UserEvent
from umbel.wire.message import DEFAULT_LIMITS, Limits
from umbel.wire.result import encode_state
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.app import App

log = logging.getLogger("umbel.task")

BURST, PER_SECOND = 50, 10.0
EVENT_MAX_BYTES = 16 * 1024
EVENT_LIMITS = Limits(depth_max=DEFAULT_LIMITS.depth_max - 4)  # on its way it is nested in other values
TYPE_MAX_CHARS = 100
_BUILT_IN_STATES = frozenset(STATES.values())
_RESERVED = frozenset(  # fields that every event has
    {"type", "uuid", "hostname", "pid", "clock", "timestamp", "utcoffset", "inc", "seq", "retries", "name"}
)


def reports_of(app: "App", request: Request) -> "Reports | None":
    """The reports of a running task; None if the task was called as a function."""
    if request.reports is None and not request.called_directly:
        request.reports = Reports(app, request)
    return request.reports


class Reports:
    """The reports of one run of a task."""

    def __init__(self, app: "App", request: Request) -> None:
        self._app = app
        self._request = request
        self._allowed = float(BURST)
        self._counted_at = monotonic()
        self._retained: tuple[str, Any] | None = None

    def state(self, state: str, meta: Any) -> None:
        """Store a state and send its event; BrokerError if it cannot be stored, as for any other result."""
        encode_json(meta, root="meta")  # refuses a value that cannot be sent where it is reported
        if self._may_send():
            self._retained = None
            self._send(state, meta)
        else:
            self._retained = (state, meta)

    def event(self, event_type: str, fields: Mapping[str, Any], *, blind: bool = False) -> bool:
        """Send a custom event; False if there were too many, or no worker runs the task."""
        check_type(event_type)
        return self._may_send() and self._send_event(event_type, fields, blind=blind)

    def flush(self) -> None:
        """Send the retained state, before the task's result."""
        if self._retained is None:
            return
        (state, meta), self._retained = self._retained, None
        try:
            self._send(state, meta)
        except BrokerError as error:
            log.warning(
                "cannot store the last custom state of a task; its result is not affected",
                extra={"task_id": self._request.id, "why": str(error)},
            )

    def _may_send(self) -> bool:
        now = monotonic()
        self._allowed = min(float(BURST), self._allowed + (now - self._counted_at) * PER_SECOND)
        self._counted_at = now
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True

    def _send(self, state: str, meta: Any) -> None:
        stored = replace(encode_state(self._request.id, state, meta), reply_to=self._request.reply_to)
        self._app.backend.store([stored])
        event_type = f"{TASK_PREFIX}{state.lower()}"
        if state not in _BUILT_IN_STATES and event_type not in KNOWN_TYPES and is_type(event_type):
            self._send_event(event_type, meta if isinstance(meta, Mapping) else {"meta": meta})

    def _send_event(self, event_type: str, fields: Mapping[str, Any], *, blind: bool = False) -> bool:
        request = self._request
        if request.send_event is None:
            return False
        plain = {str(name): value for name, value in fields.items() if name not in _RESERVED}
        try:
            encoded = encode_json(plain, root="event", limits=EVENT_LIMITS)
            if request.secrets:
                encoded = encode_json(request.secrets.strike_all(decode_json(encoded)), root="event")
        except WireError as error:
            log.warning(
                "custom event cannot be encoded; not sent", extra={"event": event_type, "why": str(error)}
            )
            return False
        if len(encoded) > EVENT_MAX_BYTES:
            encoded = encode_json({"left_out_bytes": len(encoded)})
        request.send_event(UserEvent(request.number, event_type, time(), encoded, blind))
        return True


def is_type(event_type: str) -> bool:
    """Whether this is a well-formed event type."""
    return len(event_type) <= TYPE_MAX_CHARS and all(
        part.isascii() and part.replace("_", "").isalnum() for part in event_type.split("-")
    )


def check_type(event_type: str) -> None:
    """ValueError for a type that users may not send: a built-in one, a worker's, or an invalid name."""
    if event_type in KNOWN_TYPES or event_type.startswith("worker-"):
        raise ValueError(
            f"event type {event_type!r} is reserved for workers; use another one, such as 'task-mine'"
        )
    if "-" not in event_type or not is_type(event_type):
        raise ValueError(
            f"event type {event_type!r} must be GROUP-NAME of letters, digits and '_', as in 'task-progress'"
        )
