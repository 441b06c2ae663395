"""TaskOptions: what `@app.task(...)` says about one task, checked when the task is defined."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

import msgspec

from umbel.app.types.call_types import CallTypes
from umbel.errors import ConfigurationError, nearest
from umbel.protocol.delivery.limits import ClusterLimit, Concurrency, Rate
from umbel.protocol.delivery.rate import parse_rate
from umbel.protocol.delivery.sensitive import Sensitive
from umbel.protocol.retry import RetryPolicy
from umbel.wire.limits import COUNT_MAX, DELAY_MAX_S, TIME_LIMIT_MAX_S
from umbel.wire.show import brief

PRIORITY_MAX = 9

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=DELAY_MAX_S)]
Limit = Annotated[float, msgspec.Meta(gt=0.0, le=TIME_LIMIT_MAX_S)]


class TaskKeywords(TypedDict, total=False):
    """What `@app.task(...)` takes, beside `bind`."""

    name: str
    base: type[Any]
    queue: str
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
    acks_late: bool
    acks_early: bool
    ignore_result: bool
    autoretry_for: tuple[type[BaseException], ...]
    dont_autoretry_for: tuple[type[BaseException], ...]
    retry_kwargs: Mapping[str, Any]
    throws: tuple[type[BaseException], ...]
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)] | None
    default_retry_delay: Seconds
    retry_backoff: bool | Seconds
    retry_backoff_max: Seconds
    retry_jitter: bool
    rate_limit: str | float | None  # of each worker
    limit: Rate | Concurrency  # of the cluster
    time_limit: Limit
    soft_time_limit: Limit
    expires: Limit
    typing: bool
    serializer: Literal["json", "msgpack", "pickle"]
    track_started: bool
    sensitive: tuple[str, ...]
    unique_for: Limit
    keep_failed: bool
    before_start: Callable[..., Any]
    on_success: Callable[..., Any]
    on_failure: Callable[..., Any]
    on_retry: Callable[..., Any]
    after_return: Callable[..., Any]


_TYPES = get_type_hints(TaskKeywords, include_extras=True)
TASK_KEYWORDS = frozenset(_TYPES)
_HOOKS = frozenset({"before_start", "on_success", "on_failure", "on_retry", "after_return"})
_EXCEPTIONS = frozenset({"autoretry_for", "dont_autoretry_for", "throws"})


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    bind: bool = False
    queue: str | None = None
    priority: int | None = None
    acks_early: bool | None = None
    ignore_result: bool | None = None
    autoretry_for: tuple[type[BaseException], ...] = ()
    dont_autoretry_for: tuple[type[BaseException], ...] = ()
    retry_kwargs: Mapping[str, Any] = {}
    throws: tuple[type[BaseException], ...] = ()
    retry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)
    autoretry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)
    rate_limit: str | float | None = None
    rate_per_second: float = 0.0
    limit: Rate | Concurrency | None = None
    cluster_limit: ClusterLimit | None = None  # the same, once the function is known
    time_limit_s: float | None = None
    soft_time_limit_s: float | None = None
    expires_s: float | None = None
    typing: bool = True
    serializer: str | None = None
    track_started: bool = False
    sensitive: tuple[str, ...] = ()
    unique_for_s: float | None = None
    keep_failed: bool = True
    hides: Sensitive | None = None  # the same, once the function is known
    types: CallTypes | None = None  # what its annotations say; None: nothing to check or to convert
    hooks: Mapping[str, Callable[..., Any]] = {}

    def is_plain(self, serializer: str) -> bool:
        """Whether the headers of its calls differ in ids and arguments alone, and show the latter."""
        others = (self.expires_s, self.hides, self.cluster_limit)
        return serializer == "json" and all(one is None for one in others)

    def limit_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | msgspec.UnsetType:
        """Filled in where the call is sent: all arguments can be read here, a worker reads JSON alone."""
        return msgspec.UNSET if self.cluster_limit is None else self.cluster_limit.key_of(args, kwargs)

    @property
    def retry_options(self) -> dict[str, Any]:
        """What an attempt after an automatic retry is sent with, besides its time."""
        return {name: value for name, value in self.retry_kwargs.items() if name not in _OF_THE_POLICY}


_OF_THE_POLICY = frozenset({"max_retries", "countdown"})


def options_from(task: str, given: Mapping[str, Any], *, bind: bool) -> TaskOptions:
    _refuse_unknown(task, given)
    # None is "not given", but for max_retries it is "for ever".
    given = {name: value for name, value in given.items() if value is not None or name == "max_retries"}
    _refuse_ill_typed(task, given)
    backoff = given.get("retry_backoff", False)
    retry = RetryPolicy(
        max_retries=given.get("max_retries", 3),
        delay_s=given.get("default_retry_delay", 180.0),
        backoff_s=None if backoff is False else float(backoff),  # True is one second
        backoff_max_s=given.get("retry_backoff_max", 600.0),
        jitter=given.get("retry_jitter", True),
    )
    retry_kwargs = dict(given.get("retry_kwargs", {}))
    return TaskOptions(
        bind=bind,
        queue=given.get("queue"),
        priority=given.get("priority"),
        acks_early=_acks_early(task, given.get("acks_late"), given.get("acks_early")),
        ignore_result=given.get("ignore_result"),
        autoretry_for=tuple(given.get("autoretry_for", ())),
        dont_autoretry_for=tuple(given.get("dont_autoretry_for", ())),
        retry_kwargs=retry_kwargs,
        throws=tuple(given.get("throws", ())),
        retry=retry,
        autoretry=retry.replaced(
            max_retries=retry_kwargs.get("max_retries", retry.max_retries),
            delay_s=retry_kwargs.get("countdown", retry.delay_s),
        ),
        rate_limit=given.get("rate_limit"),
        rate_per_second=_rate(task, given.get("rate_limit")),
        limit=given.get("limit"),
        time_limit_s=given.get("time_limit"),
        soft_time_limit_s=given.get("soft_time_limit"),
        expires_s=given.get("expires"),
        typing=given.get("typing", True),
        serializer=given.get("serializer"),
        track_started=given.get("track_started", False),
        sensitive=tuple(given.get("sensitive", ())),
        unique_for_s=given.get("unique_for"),
        keep_failed=given.get("keep_failed", True),
        hooks={name: value for name, value in given.items() if name in _HOOKS},
    )


def checked_priority(priority: Any) -> Any:
    """The priority as given, None included; ValueError when there is no such priority."""
    if priority is None or (type(priority) is int and 0 <= priority <= PRIORITY_MAX):
        return priority
    raise ValueError(f"priority {brief(priority)} is not a whole number from 0 to {PRIORITY_MAX}")


def _refuse_unknown(task: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _TYPES:
            near = nearest(name, _TYPES)
            hint = f"; did you mean {near!r}?" if near else ""
            raise TypeError(f"unknown option {name!r} of task {task!r}{hint}")


def _refuse_ill_typed(task: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name == "rate_limit":  # parsed separately
            continue
        if name == "limit":
            problem = (
                ""
                if isinstance(value, Rate | Concurrency)
                else "write Rate('100/m', key='{customer}') or Concurrency(4, key='{customer}') of umbel"
            )
        elif name in _HOOKS:
            problem = "" if callable(value) else "it must be callable"
        elif name in _EXCEPTIONS:
            problem = "" if _are_exceptions(value) else "it must be a tuple of exception classes"
        else:
            problem = _type_problem(value, _TYPES[name])
        if problem:
            raise ConfigurationError(f"option {name!r} of task {task!r} is {value!r}: {problem}")


def _type_problem(value: object, wanted: Any) -> str:
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _are_exceptions(value: object) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(one, type) and issubclass(one, BaseException) for one in value
    )


def _acks_early(task: str, late: bool | None, early: bool | None) -> bool | None:
    """Two names for one choice: late is the default, early the option."""
    if late is not None and early is not None and late == early:
        raise ConfigurationError(
            f"task {task!r} has both acks_late={late} and acks_early={early}; give one of them"
        )
    return early if late is None else not late


def _rate(task: str, limit: str | float | None) -> float:
    try:
        return parse_rate(limit) if limit is not None else 0.0
    except ValueError as error:
        raise ConfigurationError(f"rate_limit of task {task!r}: {error}") from None
