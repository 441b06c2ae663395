"""What leaves to Sentry without the sensitive arguments of the run that made it: events, logs, metrics.

Values are struck wherever they are; names only where they are the user's. The names of Sentry's own protocol
stay, and so do the fields that its SDK fills: without them nothing is sent, or an event without its
exception. Where everything is secret, an event says what kind of error it is, and of which task.
"""

from typing import Any

from umbel.protocol.delivery.sensitive import DEPTH_MAX, MASK, Secrets

TASK, TASK_ID, NODE, ABOUT = "umbel.task", "umbel.task_id", "umbel.node", "umbel-task"
Fields = dict[str, Any]

_OURS = frozenset({TASK, TASK_ID, NODE, ABOUT})  # no argument of a task
_BY_SDK = frozenset({"event_id", "timestamp", "start_timestamp", "platform", "level", "type", "sdk"})
_BY_SETUP = frozenset({"release", "environment", "dist", "server_name", "transaction", "transaction_info"})
_OF_TRACE = frozenset({"trace_id", "span_id", "parent_span_id", "op", "origin", "status", "type"})
_OF_ERROR = frozenset({"type", "module", "mechanism"})
_OF_LOG = frozenset({"body", "name", "value"})
_WITH_USERS_NAMES = frozenset(
    {"extra", "tags", "contexts", "data", "params", "kwargs", "user", "headers", "cookies", "env"}
)


def struck_event(event: Fields, secrets: Secrets) -> Fields:
    """Local variables are left out: a value may be cut there to what nobody recognises."""
    if secrets.is_everything:
        return _bare(event)
    for one in (*_values(event, "exception"), *_values(event, "threads")):
        for frame in (one.get("stacktrace") or {}).get("frames") or ():
            frame.pop("vars", None)
    strike = _Striking(secrets)
    return {name: one if name in _BY_SDK else strike.field(name, one) for name, one in event.items()}


def struck_log(log: Fields, secrets: Secrets) -> Fields:
    """A log line, or a metric."""
    strike = _Striking(secrets)
    found = {
        name if name.startswith("sentry.") else secrets.strike(name): strike.value(one, names=True)
        for name, one in (log.get("attributes") or {}).items()
    }
    return log | {name: strike.leaf(log[name]) for name in _OF_LOG & log.keys()} | {"attributes": found}


class _Striking:
    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    def field(self, name: str, value: Any) -> Any:
        """A field of an event."""
        struck = self.value(value, names=name in _WITH_USERS_NAMES)
        if name == "contexts" and isinstance(trace := (value or {}).get("trace"), dict):
            struck["trace"] = self.value(trace, names=False) | _of_trace(trace)
        return struck

    def value(self, value: Any, *, names: bool, depth: int = 0) -> Any:
        """`names`: those of this mapping, and of what is below, are the user's."""
        if depth > DEPTH_MAX:
            return MASK
        if isinstance(value, list | tuple):
            return [self.value(one, names=names, depth=depth + 1) for one in value]
        if not isinstance(value, dict):
            return self.leaf(value)
        return {
            (self.leaf(name) if names and name not in _OURS else name): self._below(name, one, names, depth)
            for name, one in value.items()
        }

    def leaf(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._secrets.strike(value)
        try:
            shown = (str(value), repr(value))  # either is what the SDK would send
        except Exception:
            return MASK
        return value if all(self._secrets.strike(one) == one for one in shown) else MASK

    def _below(self, name: str, value: Any, names: bool, depth: int) -> Any:
        if name == ABOUT and isinstance(value, dict):
            told = {one: value[one] for one in ("task", "id") if one in value}
            return self.value(value, names=False, depth=depth + 1) | told
        if name in _OURS:
            return value
        return self.value(value, names=names or name in _WITH_USERS_NAMES, depth=depth + 1)


def _bare(event: Fields) -> Fields:
    bare = {name: one for name, one in event.items() if name in _BY_SDK | _BY_SETUP}
    bare["tags"] = {name: one for name, one in (event.get("tags") or {}).items() if name in _OURS}
    if errors := _values(event, "exception"):
        told = [{name: one[name] for name in _OF_ERROR & one.keys()} | {"value": MASK} for one in errors]
        bare["exception"] = {"values": told}
    else:
        bare["message"] = MASK
    if about := (event.get("extra") or {}).get(ABOUT):
        bare["extra"] = {ABOUT: {name: about[name] for name in ("task", "id") if name in about}}
    if trace := (event.get("contexts") or {}).get("trace"):
        bare["contexts"] = {"trace": _of_trace(trace)}
    return bare


def _values(event: Fields, name: str) -> list[Fields]:
    return list((event.get(name) or {}).get("values") or ())


def _of_trace(trace: Fields) -> Fields:
    return {name: one for name, one in trace.items() if name in _OF_TRACE}
