"""Options: what can be stated of a task where it is defined, in `task_routes`, and where it is sent; and
which parameters of the function the options `limit` and `sensitive` name.

An option that a send states comes before the route's, and that before the task's own.

`task_routes` maps task names or shell patterns to a queue name or to options:

    task_routes = {"billing.*": "billing", "reports.nightly": {"queue": "slow", "priority": 9}}

The first pattern that matches wins, in the order written. A call's own option precedes the task's option,
which precedes the route, which precedes the default.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

import msgspec

from umbel.app.types import CallTypes
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import check_limits_on
from umbel.errors import BadSetting, ConfigurationError, nearest
from umbel.patterns import fits_glob
from umbel.protocol.delivery.limits import ClusterLimit, Concurrency, Field, Rate, check_names, parse_rate
from umbel.protocol.delivery.sensitive import Sensitive
from umbel.protocol.delivery.states import RetryPolicy
from umbel.wire.message import COUNT_MAX, DELAY_MAX_S, TIME_LIMIT_MAX_S, broken_rule
from umbel.wire.show import brief
from umbel.wire.steps import SignatureMap, Step

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp


# ---- task options ----------------------------------------------------------------------------------
#
# The options of `@app.task(...)`, checked when the task is defined.

PRIORITY_MAX = 9

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=DELAY_MAX_S)]
Limit = Annotated[float, msgspec.Meta(gt=0.0, le=TIME_LIMIT_MAX_S)]


class TaskKeywords(TypedDict, total=False):
    """The options of `@app.task(...)`, apart from `bind`."""

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
    """The checked options of one task, with what is derived from them once its function is known."""

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
    cluster_limit: ClusterLimit | None = None  # of `limit`, once the function is known
    time_limit_s: float | None = None
    soft_time_limit_s: float | None = None
    expires_s: float | None = None
    typing: bool = True
    serializer: str | None = None
    track_started: bool = False
    sensitive: tuple[str, ...] = ()
    unique_for_s: float | None = None
    keep_failed: bool = True
    hides: Sensitive | None = None  # of `sensitive`, once the function is known
    types: CallTypes | None = None  # of the annotations; None: nothing to check or to convert
    hooks: Mapping[str, Callable[..., Any]] = {}

    def is_plain(self, serializer: str) -> bool:
        """Whether headers of its calls differ in ids and arguments alone, and may show the arguments."""
        others = (self.expires_s, self.hides, self.cluster_limit)
        return serializer == "json" and all(option is None for option in others)

    def limit_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | msgspec.UnsetType:
        """The key that a call counts under; computed by the sender, since a worker can read JSON arguments
        alone.
        """
        return msgspec.UNSET if self.cluster_limit is None else self.cluster_limit.key_of(args, kwargs)

    @property
    def retry_options(self) -> dict[str, Any]:
        """The send options of an attempt after an automatic retry, apart from its time."""
        return {name: value for name, value in self.retry_kwargs.items() if name not in _OF_THE_POLICY}


_OF_THE_POLICY = frozenset({"max_retries", "countdown"})


def options_from(task: str, given: Mapping[str, Any], *, bind: bool) -> TaskOptions:
    """Check the options of a definition and return them; TypeError or ConfigurationError names the wrong
    option.
    """
    _refuse_unknown(task, given)
    # None means "not given", except for max_retries, where it means "without limit".
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
    """Return the priority unchanged, None included; ValueError if it is out of range."""
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
        isinstance(kind, type) and issubclass(kind, BaseException) for kind in value
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


# ---- send options ----------------------------------------------------------------------------------
#
# The options of one call, checked where they are written.


class SendOptions(TypedDict, total=False):
    """The options of `apply_async` and `Signature.set`."""

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
            _refuse_unknown_word(name, options)
        elif name == "priority":
            checked_priority(value)
        elif (rule := broken_rule(name, value)) is not None:
            kind = ValueError if isinstance(value, rule.kinds) and type(value) is not bool else TypeError
            raise kind(f"option {name!r} for sending a task is {brief(value)}; it must be {rule.wanted}")


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a signature from a message that this version knows; unknown ones are left out."""
    known = _OPTION_NAMES.union(options.get("stamped_headers") or ())
    return {name: value for name, value in options.items() if name in known}


def _refuse_unknown_word(name: str, options: Mapping[str, Any]) -> None:
    if name in (options.get("stamped_headers") or ()):
        return
    near = nearest(name, sorted(_OPTION_NAMES))
    hint = f"; did you mean {near!r}?" if near else ""
    raise TypeError(f"unknown option {name!r} for sending a task{hint}")


# ---- routing ---------------------------------------------------------------------------------------
#
# The queue of a task when neither the call nor the task names one.

ROUTE_OPTIONS = frozenset({"queue", "priority"})
NAMES_MAX = 10_000  # task names whose route is remembered; past this they are looked up again
_NO_ROUTE: Mapping[str, Any] = {}


class Router:
    """Looks up the route of a task by its name, and caches the answer."""

    def __init__(self, routes: Mapping[str, str | Mapping[str, Any]]) -> None:
        self._routes = [(pattern, _options(pattern, route)) for pattern, route in routes.items()]
        self._found: dict[str, Mapping[str, Any]] = {}

    def route(self, task: str) -> Mapping[str, Any]:
        """The options of the first pattern that matches the task's name; empty if none does."""
        if not self._routes:
            return _NO_ROUTE
        found = self._found.get(task)
        if found is None:
            if len(self._found) >= NAMES_MAX:
                self._found.clear()
            found = self._found[task] = self._first_match(task)
        return found

    def _first_match(self, task: str) -> Mapping[str, Any]:
        return next((options for pattern, options in self._routes if fits_glob(task, pattern)), _NO_ROUTE)


def _options(pattern: str, route: str | Mapping[str, Any]) -> Mapping[str, Any]:
    options = {"queue": route} if isinstance(route, str) else dict(route)
    problem = _problem(options)
    if problem:
        raise BadSetting("task_routes", {pattern: route}, problem, source="the app's settings")
    return options


def _problem(options: Mapping[str, Any]) -> str:
    unknown = sorted(set(options) - ROUTE_OPTIONS)
    if unknown:
        return f"unknown options {unknown}; a route takes {sorted(ROUTE_OPTIONS)}"
    if not isinstance(options.get("queue", ""), str):
        return f"queue {options['queue']!r} must be text"
    try:
        checked_priority(options.get("priority"))
    except ValueError as error:
        return str(error)
    return ""


# ---- limits ----------------------------------------------------------------------------------------
#
# Cluster limits as a task states them, tied to the parameters of its function.

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_limit(own: TaskOptions, broker: BrokerSettings) -> None:
    """Refuse to send a task with a cluster limit through a broker that cannot enforce it."""
    if own.cluster_limit is not None:
        check_limits_on(broker, own.cluster_limit.task)


def limit_of(task: str, options: TaskOptions, parameters: Sequence[inspect.Parameter]) -> ClusterLimit | None:
    """The cluster limit of a task, tied to its parameters as callers see them; None without one."""
    stated = options.limit
    if stated is None:
        return None
    if isinstance(stated, Concurrency) and options.acks_early:
        raise ConfigurationError(
            f"task {task!r} has limit={stated!r} and acks_early: a message that is acknowledged holds no "
            "slot; leave acks_early out, or use Rate"
        )
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in _NAMED}
    check_names(task, stated, tuple(named), options.sensitive)
    places = {
        parameter.name: place for place, parameter in enumerate(parameters) if parameter.kind is _NAMED[0]
    }
    fields = tuple(Field(name, places.get(name), *_default(named[name])) for name in stated.names)
    return ClusterLimit(task, stated.key, fields, stated.terms)


def _default(parameter: inspect.Parameter) -> tuple[object, bool]:
    if parameter.default is inspect.Parameter.empty:
        return None, False
    return parameter.default, True


# ---- secrecy ---------------------------------------------------------------------------------------
#
# Which parameters of a task's function are sensitive, from their names and its signature.

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def sensitive_of(
    task: str, names: Sequence[str], parameters: Sequence[inspect.Parameter]
) -> Sensitive | None:
    """Which arguments of a call are sensitive, by the parameters that a caller sees.

    ConfigurationError: the function has no parameter of a given name.
    """
    if not names:
        return None
    known = {parameter.name: parameter for parameter in parameters}
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    for name in names:
        if name not in known and not takes_more:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigurationError(
                f"task {task!r} has no parameter {name!r}, which `sensitive` names{hint}"
            )
    positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    rest = next(
        (parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_POSITIONAL),
        None,
    )
    others = next(
        (parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD), None
    )
    plain = frozenset(known) - {rest, others}
    return Sensitive(
        names=frozenset(names),
        positions=frozenset(place for place, name in enumerate(positional) if name in names),
        rest_from=len(positional) if rest in names else None,
        other_names=plain if others in names else None,
    )


def has_secrets(app: "SendingApp", task: str | None) -> bool:
    """Whether the task of that name has sensitive arguments."""
    known = app.tasks.get(task or "")
    return known is not None and known.options.hides is not None
