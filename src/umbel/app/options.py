"""Options of a task, of a call and of a route. They are checked where users write them.

`task_routes` maps names of tasks, or shell patterns, to a queue or to options:

    task_routes = {"billing.*": "billing", "reports.nightly": {"queue": "slow", "priority": 9}}

The first pattern that matches wins, in the order written. The value of an option is that of the call, else of
the task, else of the route, else of the app's setting.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

import msgspec

from umbel.app.types import CallTypes
from umbel.errors import BadSetting, ConfigurationError, nearest
from umbel.patterns import fits_glob
from umbel.protocol.delivery.limits import ClusterLimit, Concurrency, Field, Rate, check_names, parse_rate
from umbel.protocol.delivery.sensitive import Sensitive
from umbel.protocol.delivery.states import RetryPolicy
from umbel.wire.message import COUNT_MAX, DELAY_MAX_S, TIME_LIMIT_MAX_S, broken_rule
from umbel.wire.show import brief
from umbel.wire.steps import SignatureMap, Step

if TYPE_CHECKING:
    from umbel.app.app import App
    from umbel.app.task import Parameters


# ---- options of a task -----------------------------------------------------------------------------

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
HOOK_NAMES = frozenset({"before_start", "on_success", "on_failure", "on_retry", "after_return"})
_EXCEPTIONS = frozenset({"autoretry_for", "dont_autoretry_for", "throws"})


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of one task, and values derived from them and the task's function."""

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
        """Whether the headers of its calls differ only in ids and arguments, and may show the arguments."""
        others = (self.expires_s, self.hides, self.cluster_limit)
        return serializer == "json" and all(option is None for option in others)

    def limit_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | msgspec.UnsetType:
        """The key under which a call counts. Senders compute it, because workers decode only JSON
        arguments.
        """
        return msgspec.UNSET if self.cluster_limit is None else self.cluster_limit.key_of(args, kwargs)

    @property
    def retry_options(self) -> dict[str, Any]:
        """The send options of an attempt after an automatic retry, apart from its time."""
        return {name: value for name, value in self.retry_kwargs.items() if name not in _OF_THE_POLICY}


_OF_THE_POLICY = frozenset({"max_retries", "countdown"})


def options_from(task: str, given: Mapping[str, Any], *, bind: bool) -> TaskOptions:
    """The checked options of a definition; TypeError or ConfigurationError names an invalid option."""
    for name in given:
        if name not in _TYPES:
            raise TypeError(f"unknown option {name!r} of task {task!r}{_hint(name, _TYPES)}")
    # None means "not given", except for max_retries, where it means "without limit".
    given = {name: value for name, value in given.items() if value is not None or name == "max_retries"}
    for name, value in given.items():
        if problem := _type_problem(name, value):
            raise ConfigurationError(f"option {name!r} of task {task!r} is {value!r}: {problem}")
    backoff = given.get("retry_backoff", False)
    retry = RetryPolicy(
        max_retries=given.get("max_retries", 3),
        delay_s=given.get("default_retry_delay", 180.0),
        backoff_s=None if backoff is False else float(backoff),  # True is one second
        backoff_max_s=given.get("retry_backoff_max", 600.0),
        jitter=given.get("retry_jitter", True),
    )
    retry_kwargs = dict(given.get("retry_kwargs", {}))
    unchanged: dict[str, Any] = {
        _FIELD_OF[name]: tuple(value) if isinstance(value, list | set | frozenset) else value
        for name, value in given.items()
        if name in _FIELD_OF
    }
    return TaskOptions(
        **unchanged,
        bind=bind,
        acks_early=_acks_early(task, given.get("acks_late"), given.get("acks_early")),
        retry_kwargs=retry_kwargs,
        retry=retry,
        autoretry=retry.replaced(
            max_retries=retry_kwargs.get("max_retries", retry.max_retries),
            delay_s=retry_kwargs.get("countdown", retry.delay_s),
        ),
        rate_per_second=_rate(task, given.get("rate_limit")),
        hooks={name: value for name, value in given.items() if name in HOOK_NAMES},
    )


# Options that become fields of TaskOptions unchanged.
_FIELD_OF = {name: name for name in TASK_KEYWORDS.intersection(TaskOptions.__struct_fields__)}
_FIELD_OF |= {name: f"{name}_s" for name in ("time_limit", "soft_time_limit", "expires", "unique_for")}
del _FIELD_OF["acks_early"], _FIELD_OF["retry_kwargs"]


def checked_priority(priority: Any) -> Any:
    """Return the priority unchanged, also None; ValueError if it is out of range."""
    if priority is None or (type(priority) is int and 0 <= priority <= PRIORITY_MAX):
        return priority
    raise ValueError(f"priority {brief(priority)} is not a whole number from 0 to {PRIORITY_MAX}")


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def _type_problem(name: str, value: object) -> str:
    """The problem with the value of an option; "" without one."""
    if name == "rate_limit":  # parsed separately
        return ""
    if name == "limit":
        wanted = "write Rate('100/m', key='{customer}') or Concurrency(4, key='{customer}') of umbel"
        return "" if isinstance(value, Rate | Concurrency) else wanted
    if name in HOOK_NAMES:
        return "" if callable(value) else "it must be callable"
    if name in _EXCEPTIONS:
        return "" if _are_exceptions(value) else "it must be a tuple of exception classes"
    try:
        msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _are_exceptions(value: object) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(kind, type) and issubclass(kind, BaseException) for kind in value
    )


def _acks_early(task: str, late: bool | None, early: bool | None) -> bool | None:
    """The value of `acks_early`, which is the opposite of `acks_late`; None without either."""
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


# ---- options of a call -----------------------------------------------------------------------------


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
    unique_token: str  # the key that the task has taken already, for its further attempts


_OPTION_NAMES = frozenset(SendOptions.__annotations__)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that is unknown, of the wrong type or out of bounds. Names of stamps are allowed.

    Every worker would refuse such a header, so the sender gets the error.
    """
    for name, value in options.items():
        if name not in _OPTION_NAMES:
            if name not in (options.get("stamped_headers") or ()):
                hint = _hint(name, sorted(_OPTION_NAMES))
                raise TypeError(f"unknown option {name!r} for sending a task{hint}")
        elif name == "priority":
            checked_priority(value)
        elif (rule := broken_rule(name, value)) is not None:
            kind = ValueError if isinstance(value, rule.kinds) and type(value) is not bool else TypeError
            raise kind(f"option {name!r} for sending a task is {brief(value)}; it must be {rule.wanted}")


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a signature from a message, without those that this version does not know."""
    known = _OPTION_NAMES.union(options.get("stamped_headers") or ())
    return {name: value for name, value in options.items() if name in known}


# ---- routes ----------------------------------------------------------------------------------------

ROUTE_OPTIONS = frozenset({"queue", "priority"})
NAMES_MAX = 10_000  # task names whose route is cached; beyond this the cache is emptied
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
            matching = (options for pattern, options in self._routes if fits_glob(task, pattern))
            found = self._found[task] = next(matching, _NO_ROUTE)
        return found


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


# ---- parameters that options name ------------------------------------------------------------------


def limit_of(options: TaskOptions, parameters: "Parameters") -> ClusterLimit | None:
    """The cluster limit of a task, tied to the parameters of its function; None without one."""
    limit, task = options.limit, parameters.task
    if limit is None:
        return None
    if isinstance(limit, Concurrency) and options.acks_early:
        raise ConfigurationError(
            f"task {task!r} has limit={limit!r} and acks_early: a message that is acknowledged holds no "
            "slot; leave acks_early out, or use Rate"
        )
    by_name = {parameter.name: parameter for parameter in parameters.by_name}
    check_names(task, limit, tuple(by_name), options.sensitive)
    places = {parameter.name: place for place, parameter in enumerate(parameters.positional)}
    fields = tuple(Field(name, places.get(name), *_default(by_name[name])) for name in limit.names)
    return ClusterLimit(task, limit.key, fields, limit.terms)


def _default(parameter: inspect.Parameter) -> tuple[object, bool]:
    if parameter.default is inspect.Parameter.empty:
        return None, False
    return parameter.default, True


def sensitive_of(names: Sequence[str], parameters: "Parameters") -> Sensitive | None:
    """The sensitive arguments of a task, which are named by the parameters of its function; None without any.

    ConfigurationError: the function has no parameter of a given name.
    """
    if not names:
        return None
    known = [parameter.name for parameter in parameters.every]
    for name in names:
        if name not in known and parameters.others is None:
            problem = f"task {parameters.task!r} has no parameter {name!r}, which `sensitive` names"
            raise ConfigurationError(problem + _hint(name, known))
    return Sensitive(
        names=frozenset(names),
        positions=frozenset(
            place for place, parameter in enumerate(parameters.positional) if parameter.name in names
        ),
        rest_from=len(parameters.positional) if parameters.rest in names else None,
        other_names=(
            frozenset(known) - {parameters.rest, parameters.others} if parameters.others in names else None
        ),
    )


def has_secrets(app: "App", task: str | None) -> bool:
    """Whether the task of that name has sensitive arguments."""
    known = app.tasks.get(task or "")
    return known is not None and known.options.hides is not None
