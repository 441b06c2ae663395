"""Message: one call in transit, in the form that every broker carries.

Headers and body stay bytes here, because most code that handles a message only forwards it: the worker's main
process reads a few headers, and only the child decodes the body. `properties_of` returns the properties as
Celery shows them. `matches` compares a routing key with a pattern, by the rules of AMQP's topic exchanges.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from umbel.errors import BadMessage, BadValue, TooLarge, WireError
from umbel.wire.show import brief

# ---- limits ----------------------------------------------------------------------------------------
#
# Others can write to the broker, so everything in a message that costs memory, stack or time has a limit
# here. Each value of a header or option must also be valid in all later stages: it fits 64 bits, a frame, a
# key, an AMQP name, a date. The sender checks the same limits. So a call that every worker would refuse fails
# where it is made, where it can be corrected. Arguments of tasks are less restricted: they may contain
# integers of any length up to a limit.

NAME_MAX_BYTES = 255  # of a queue, an id, the name of a header: the limit of AMQP
TASK_MAX_CHARS = 1024  # of a task name
HEADERS_MAX_BYTES = 100 * 1024  # RabbitMQ allows 128 KiB, including the reason of a dead letter
HEADER_TEXT_MAX_CHARS = 10_000  # of arguments as shown in headers
TIME_LIMIT_MAX_S = 10 * 365 * 86_400  # ten years
DELAY_MAX_S = 100 * 365 * 86_400  # a hundred years, so that due times are before the year 9999
COUNT_MAX = 2**31 - 1  # of retries, or of positions in a group
PRIORITY_MAX = 255  # as in AMQP; Umbel sends at most 9
EXPIRATION_MAX_MS = 2**53  # integers up to here are exact in every language

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
# a broker uses the nearest priority that it supports
Priority = Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
ExpirationMs = Annotated[int, Meta(ge=0, le=EXPIRATION_MAX_MS)]
TimeLimit = (
    Annotated[int, Meta(ge=0, le=TIME_LIMIT_MAX_S)] | Annotated[float, Meta(ge=0, le=TIME_LIMIT_MAX_S)]
)
Name = Annotated[str, Meta(max_length=NAME_MAX_BYTES)]
Moment = Annotated[str, Meta(max_length=64)]
TaskName = Annotated[str, Meta(max_length=TASK_MAX_CHARS)]


class Limits(msgspec.Struct, frozen=True):
    """Limits of a decoder. `size_max_bytes` counts the decompressed data.

    `number_digits_max` is for integers, because their conversion takes time quadratic in the number of
    digits; a minus sign counts as a digit. It can be lowered, but not raised: 4300 is built into Python and
    msgspec.
    """

    size_max_bytes: int = 64 * 1024 * 1024
    depth_max: int = 64
    number_digits_max: int = 4300


DEFAULT_LIMITS = Limits()
HEADER_LIMITS = Limits(size_max_bytes=HEADERS_MAX_BYTES)


def check_size(what: str, size_bytes: int, limits: Limits) -> None:
    """Raise TooLarge if there are more bytes than the limit; `what` begins the error text."""
    if size_bytes > limits.size_max_bytes:
        raise too_large(what, size_bytes, limits)


def too_large(what: str, size_bytes: int, limits: Limits, remedy: str = "") -> TooLarge:
    """Return the error for data that is too large; `remedy` ends its text."""
    return TooLarge(f"{what} has {size_bytes} bytes; the limit is {limits.size_max_bytes}{remedy}")


def too_deep(what: str, limits: Limits) -> TooLarge:
    """Return the error for data that is nested too deep."""
    return TooLarge(f"{what} is nested deeper than the limit of {limits.depth_max} levels")


def too_long_a_number(what: str, digits: int, limits: Limits) -> TooLarge:
    """Return the error for a number with too many digits."""
    return TooLarge(f"{what} has {digits} digits; the limit is {limits.number_digits_max}; send it as text")


def is_name(text: str, *, max_bytes: int = NAME_MAX_BYTES) -> bool:
    """Return whether the text can name a queue or be an id in every broker and store.

    It must not contain NUL, at which SQLite ends a text, or text that UTF-8 cannot encode.
    """
    if text.isascii():
        return len(text) <= max_bytes and "\0" not in text
    try:
        return len(text.encode()) <= max_bytes and "\0" not in text
    except UnicodeEncodeError:
        return False


# ---- instants --------------------------------------------------------------------------------------
#
# Celery reads a time without an offset in the receiver's configured time zone. Umbel reads it as UTC
# everywhere. Otherwise a cluster whose nodes have different time zones would run a task at different times on
# different nodes. So a naive time from a Celery client with another time zone is wrong by the difference;
# aware times, Celery's default, are always right.

EARLIEST_S = datetime(1, 1, 1, tzinfo=UTC).timestamp()
LATEST_S = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


def parse_instant(text: str) -> float:
    """Return Unix seconds for ISO 8601 text; without an offset it is UTC. Raises BadMessage."""
    try:
        moment = datetime.fromisoformat(text)
    except (ValueError, TypeError) as error:
        raise BadMessage(f"{brief(text)} is not an ISO 8601 time") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    unix_s = moment.timestamp()
    if not EARLIEST_S <= unix_s <= LATEST_S + 1:  # its offset moves it out of the range of dates
        raise BadMessage(f"{brief(text)} is not a time between the years 1 and 9999")
    # `datetime.max`, which some senders use for "never", rounds up to the year 10000
    return min(unix_s, LATEST_S)


def format_instant(unix_s: float) -> str:
    """Return Unix seconds as ISO 8601 text like Celery's: microseconds, explicit offset. Raises BadValue."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError, OSError) as error:
        raise BadValue(f"{unix_s!r} is not a time between the years 1 and 9999") from error


# ---- options ---------------------------------------------------------------------------------------
#
# The same rules apply to a client that sends a call and to signatures inside a message: callbacks, the next
# steps of a chain, the body of a chord. So a signature with an invalid option is found before its task runs,
# not after.


class Rule(NamedTuple):
    """The rule for an option; `wanted` completes the sentence "it must be ..."."""

    kinds: tuple[type, ...]
    wanted: str
    is_within: Callable[[Any], bool] = lambda _: True


def broken_rule(name: str, value: object) -> Rule | None:
    """Return the rule that this value of the option breaks; None if it is valid, or has no rule.

    None always means "not given", and a bool never counts as a number.
    """
    rule = RULES.get(name)
    if rule is None or value is None:
        return None
    if not isinstance(value, rule.kinds) or (type(value) is bool and rule.kinds is not _TRUTH):
        return rule
    return None if rule.is_within(value) else rule


def is_moment(value: datetime | str | float) -> bool:
    """Return whether a date can represent it: a datetime, ISO 8601 text, or Unix seconds."""
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
    """Return whether this is a valid task name."""
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
    return all(isinstance(name, str) and is_name(name) for name in values)


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
    **dict.fromkeys(("link", "link_error", "chord"), Rule(_ANY, "")),  # checked where they are read
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


# ---- message ---------------------------------------------------------------------------------------
#
# A broker converts this record to its envelope and back, and must not change a byte of headers or body. Data
# that is not a message is wrapped by `unreadable`, so that the worker makes it a dead letter with a reason.

JSON_CONTENT = "application/json"


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call as brokers carry it: encoded headers and body, and the properties that brokers use."""

    headers: bytes  # one JSON object
    body: bytes  # serialized, and compressed if a header says so
    content_type: str = JSON_CONTENT
    content_encoding: str = "utf-8"
    priority: Priority = 0
    correlation_id: Name = ""
    reply_to: Name = ""
    expiration_ms: ExpirationMs | None = None  # how long the broker should store it after publication
    properties: bytes = b""  # the sender's other properties as one JSON object; see below
    # the exchange through which it came, with the routing key; empty: directly to its queue
    exchange: str = ""
    routing_key: str = ""


UNREADABLE_CONTENT = "application/data"


def unreadable(data: bytes) -> Message:
    """Wrap bytes from a queue that are not a message; all properties have defaults."""
    return Message(b"", data, UNREADABLE_CONTENT, "binary")


class Outgoing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message and its destination. `not_before` is Unix time; 0 means at once.

    `redelivered`: it is sent again, and may have run before. With an `exchange` it goes to every queue that
    is bound there for its routing key, and `queue` is only for display.
    """

    queue: str
    message: Message
    not_before: float = 0.0
    redelivered: bool = False
    exchange: str = ""
    routing_key: str = ""

    @property
    def target(self) -> str:
        """Return the destination, for display."""
        return f"{self.exchange}/{self.routing_key}" if self.exchange else self.queue

    def as_letter(self) -> "Outgoing":
        """Return it as a dead letter; if sent to an exchange, it records the exchange instead of a queue."""
        if not self.exchange:
            return self
        routed = msgspec.structs.replace(self.message, exchange=self.exchange, routing_key=self.routing_key)
        return Outgoing("", routed)


class StoredResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The encoded result map of the wire protocol, which a result backend stores for one task.

    With `reply_to` it is sent to that queue instead (rpc), where the client waits for it.
    """

    task_id: str
    status: str
    payload: bytes  # JSON: status, result, traceback, children, date_done, task_id, ...
    reply_to: str = ""


# ---- properties ------------------------------------------------------------------------------------
#
# AMQP defines fourteen properties, and Redis accepts anything that a sender gives. Those that matter in
# transit are fields of `Message`. The others (`app_id`, `type`, `message_id`, ...) are carried as one JSON
# object, because task code may read them; most messages have none.

# Fields of Message, and properties that a broker writes for every copy.
OWN = frozenset(
    ("content_type", "content_encoding", "headers", "application_headers", "delivery_mode", "priority",
     "correlation_id", "reply_to", "expiration", "delivery_info", "delivery_tag", "body_encoding")
)  # fmt: skip
OTHER_MAX_BYTES = 16 * 1024  # larger properties are dropped

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def encode_others(properties: Mapping[str, Any]) -> bytes:
    """Return the value of `Message.properties`: the properties that have no field."""
    others = {name: value for name, value in properties.items() if name not in OWN and value is not None}
    encoded = _encode(others) if others else b""
    return encoded if len(encoded) <= OTHER_MAX_BYTES else b""


def others_of(message: Message) -> dict[str, Any]:
    """Return the message's properties that have no field."""
    return _decode(message.properties) if message.properties else {}


def properties_of(message: Message) -> dict[str, Any]:
    """Return all properties that are set, by AMQP's names, as in Celery's requests."""
    found: dict[str, Any] = {
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "priority": message.priority,
        "delivery_mode": 2,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
    }
    if message.expiration_ms is not None:
        found["expiration"] = str(message.expiration_ms)
    return found | others_of(message)


def delivery_info_of(message: Message, queue: str, *, redelivered: bool) -> dict[str, Any]:
    """Return how the message was delivered, in the form of Celery's requests."""
    return {
        "exchange": message.exchange,
        "routing_key": message.routing_key if message.exchange else queue,
        "priority": message.priority,
        "redelivered": redelivered,
    }


# ---- topics ----------------------------------------------------------------------------------------


def matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a routing key matches a pattern, both split at their dots.

    `*` matches exactly one word, `#` any number of words, including none.
    """
    # One pass for each part of the pattern: fits[n] says whether the parts so far match words[:n].
    fits = [True] + [False] * len(words)
    for part in pattern:
        if part == "#":
            for place in range(1, len(fits)):
                fits[place] = fits[place] or fits[place - 1]
        else:
            fits = [False] + [fits[place] and part in ("*", word) for place, word in enumerate(words)]
    return fits[-1]
