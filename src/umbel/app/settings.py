"""Settings: every option of an app, with its type, bounds and default. Only this module reads environment and
files.

Later sources win: the defaults below, `[tool.umbel]` of the nearest pyproject.toml, the constructor of `App`,
`UMBEL_*` variables, and the flags of a command. So an operator can change what a developer wrote without
touching the code. An unknown name or a value of the wrong type is refused at once, with the nearest known
name.

The comment above a setting becomes its text in docs/settings.md (`scripts/reference.py`).
"""

import os
import re
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from umbel.brokers.interface import BrokerSettings
from umbel.errors import BadSetting, ConfigurationError, UnknownSetting
from umbel.protocol.delivery.trust import SIGNING_WINDOW_MAX_S
from umbel.text import lake_place, without_password
from umbel.wire.message import TIME_LIMIT_MAX_S
from umbel.wire.signing import Keyring, cluster_problem, key_problem, keyring_of, shown_keys

ENVIRONMENT_PREFIX = "UMBEL_"
# Read by commands, not by the app: where to look and how to log, before an app is loaded.
ENVIRONMENT_RESERVED = frozenset(
    {
        *("UMBEL_APP", "UMBEL_RUN_DIR", "UMBEL_LOG_LEVEL", "UMBEL_LOG_FORMAT", "UMBEL_SOAK"),
        *("UMBEL_WEB_STATE", "UMBEL_WEB_PUBLIC_URL"),
        *("UMBEL_WEB_OIDC_ISSUER", "UMBEL_WEB_OIDC_CLIENT_ID", "UMBEL_WEB_OIDC_SECRET"),
    }
)
EMBEDDED_FILE = "umbel.db"


class Bounds(NamedTuple):
    """The smallest and the largest value of a setting."""

    least: float
    most: float = inf

    def problem(self, value: float) -> str:
        """The problem with the value; "" if it is within the bounds."""
        if not value >= self.least:  # not `value < self.least`, which is false for NaN
            return f"must be at least {self.least}"
        return "" if value <= self.most else f"must be at most {self.most}"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of an app, with its default. Names end in their unit."""

    # address of the broker, see [brokers](brokers.md); separate several with `;` for failover; empty: the
    # embedded broker, in the file `umbel.db`
    broker: str = ""
    # address of the result backend, or `rpc://`; empty: the broker, if it can store results
    backend: str = ""
    # address of a second broker for what [Google Pub/Sub](brokers.md#google-pubsub) cannot do: leases,
    # elections, delayed and unique tasks, limits
    coordination_store: str = ""
    # seconds for the broker to answer, or for the embedded broker's file to be unlocked
    connect_timeout_s: Annotated[float, Bounds(0.01)] = 4.0
    # seconds that a starting worker waits for an unavailable broker before it exits with 69; 0: do not wait
    broker_connection_wait_s: Annotated[float, Bounds(0)] = 60.0
    # seconds that a sender waits for an unavailable broker; 0: do not wait
    publish_timeout_s: Annotated[float, Bounds(0)] = 4.0
    # most messages that a running task may buffer while the broker is unavailable
    publish_buffer_max: Annotated[int, Bounds(0)] = 1000
    # largest size of a message; senders and workers refuse larger ones
    message_max_bytes: Annotated[int, Bounds(1024)] = 16 * 1024 * 1024
    # `ID:SECRET` entries; the first key signs, all keys verify: see [security](security.md)
    signing_keys: tuple[str, ...] = ()
    # the id of this cluster, to which signatures are bound; empty: the id of the broker (`umbel cluster-id`)
    signing_cluster: str = ""
    # seconds that a signed task stays valid after it was sent or due; a week at most
    signing_window_s: Annotated[float, Bounds(1, SIGNING_WINDOW_MAX_S)] = 86_400.0
    # verify what Umbel 0.3 signed, for `signing_window_s` after the cluster's id was made; the next release
    # has this off
    signing_accept_unbound: bool = True
    # queues whose messages need no signature, for Celery clients; `*`: all queues
    accept_unsigned: tuple[str, ...] = ()
    # seconds of silence after which a worker's messages are redelivered to other workers
    lease_s: Annotated[float, Bounds(0.1)] = 10.0
    # size limit of the embedded broker's file
    storage_max_bytes: Annotated[int | None, Bounds(64 * 1024)] = None
    # folder of the [history](history.md), relative to the working directory, or `s3://bucket/prefix`
    history_lake: str = "umbel-lake"
    # octal mode of the lake's folders; files get the same mode without execute permission; `0750` lets the
    # group read
    lake_mode: str = "0700"
    # have the history recorded if no other recorder runs, as with `--record`
    worker_record: bool = False
    # serve metrics for Prometheus at this port or HOST:PORT, as with `--metrics`
    worker_metrics: str = ""
    # address of the database with the [outbox](outbox.md), or a list of them: `postgresql://...`,
    # `sqlite:///file`; workers publish what is written there
    outbox: str | tuple[str, ...] = ()
    # name of the outbox's table, with its schema if the search path does not have it
    outbox_table: str = "umbel_outbox"
    # most seconds between two looks into an empty outbox
    outbox_poll_s: Annotated[float, Bounds(0.01)] = 0.25
    # most events that the broker keeps for recorders
    event_log_max: Annotated[int, Bounds(1)] = 1_000_000
    # seconds that the broker keeps events for recorders
    event_log_retention_s: Annotated[float, Bounds(0)] = 7 * 86_400.0
    # most revokes in force; at this limit more are refused with `RevokesFull`. Each worker holds all of them
    # in memory, about 300 bytes each
    revokes_max: Annotated[int, Bounds(1, 5_000_000)] = 1_000_000
    # seconds that a revoke holds; longer than the longest delay of a task that you may revoke. On RabbitMQ
    # more than a week [needs a new stream](brokers.md#limits-of-rabbitmq)
    revoke_retention_s: Annotated[float, Bounds(1, 365 * 86_400.0)] = 7 * 86_400.0
    # queue for calls of tasks that name none
    task_default_queue: str = "celery"
    # priority of calls that have none, 0 to 9
    task_default_priority: Annotated[int, Bounds(0, 9)] = 0
    # queue and options by patterns of task names
    task_routes: dict[str, str | dict[str, Any]] = {}
    # how arguments are encoded
    task_serializer: Literal["json", "msgpack", "pickle"] = "json"
    # serializers that workers accept; others are refused
    accept_content: tuple[str, ...] = ("json",)
    # store no results
    task_ignore_result: bool = False
    # true: acknowledge a message after its task has run; false: before; a task's own option wins
    task_acks_late: bool = True
    # seconds after which the process of a task is killed; a task's own option wins
    task_time_limit_s: Annotated[float | None, Bounds(0.001, TIME_LIMIT_MAX_S)] = None
    # seconds after which `SoftTimeLimitExceeded` is raised in the task
    task_soft_time_limit_s: Annotated[float | None, Bounds(0.001, TIME_LIMIT_MAX_S)] = None
    # starts that may end with a dead process before the task becomes a dead letter
    task_max_deliveries: Annotated[int, Bounds(1)] = 3
    # length to which arguments and results are cut in events, logs and headers
    task_repr_max_chars: Annotated[int, Bounds(64)] = 1024
    # largest size of a stored traceback; of a longer one only the end is stored
    task_traceback_max_bytes: Annotated[int, Bounds(1024)] = 64 * 1024
    # let tasks wait for the results of other tasks
    task_allow_join: bool = False
    # run tasks in the process that sends them, at once
    task_always_eager: bool = False
    # workers send an event at every step of a task, as with `-E`
    task_send_events: bool = False
    # clients send an event for every task they send
    task_send_sent_event: bool = False
    # seconds until results expire
    result_expires_s: Annotated[float, Bounds(0)] = 86_400.0
    # store name, arguments, worker, retries and queue with each result
    result_extended: bool = False
    # messages of failed tasks that the broker keeps, so that they can be [retried](failures.md); the oldest
    # make room; 0: none
    failed_keep: Annotated[int, Bounds(0, 100_000)] = 10_000
    # seconds until the messages of failed tasks expire; 49 days at most
    failed_keep_s: Annotated[float, Bounds(1, 49 * 86_400.0)] = 7 * 86_400.0
    # largest size of a retained message of a failed task
    failed_keep_max_bytes: Annotated[int, Bounds(1024)] = 64 * 1024
    # tasks that run at once; default: one per core, 100 in green pools
    worker_concurrency: Annotated[int | None, Bounds(1)] = None
    # where tasks run: see [pools](pools.md)
    worker_pool: Literal["prefork", "solo", "threads", "asyncio", "gevent"] = "prefork"
    # event loop of a worker; `auto`: uvloop if it is installed
    worker_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    # child processes that share the greenlets of the `gevent` pool
    worker_gevent_children: Annotated[int, Bounds(1)] = 1
    # queues to consume; empty: the default queue
    worker_queues: tuple[str, ...] = ()
    # most messages that a worker claims, running and waiting
    worker_prefetch_max: Annotated[int, Bounds(1)] = 1000
    # seconds that a stopping worker waits for running tasks
    worker_grace_s: Annotated[float, Bounds(0)] = 30.0
    # seconds that a worker waits after a second stop signal, when it has interrupted the running tasks
    worker_soft_grace_s: Annotated[float, Bounds(0)] = 5.0
    # seconds for each of your `worker_init`, `worker_ready` and `worker_shutdown` hooks; the worker goes on
    # without a slower one
    worker_hook_timeout_s: Annotated[float, Bounds(0)] = 10.0
    # how child processes start; `auto`: fork from the loaded app, or spawn if its threads or sockets make a
    # fork unsafe
    worker_child_start: Literal["auto", "fork", "spawn"] = "auto"
    # `[10, 3]`: between 3 and 10 child processes, by load; replaces `worker_concurrency`
    worker_autoscale: tuple[int, int] | None = None
    # seconds without work after which a surplus child process is stopped
    worker_autoscale_cool_down_s: Annotated[float, Bounds(0)] = 30.0
    # log what tasks print in child processes, with the name of the task
    worker_redirect_stdouts: bool = True
    # log level of what tasks print
    worker_redirect_stdouts_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    # log each task that succeeds, with its run time and result, as `umbel dev` does; limited in rate, like
    # all lines about tasks
    worker_log_successes: bool = False
    # allow the command `pool_restart`, which replaces all child processes one by one; with `reload` it loads
    # the app again
    worker_pool_restarts: bool = False
    # seconds for a child process to become ready before it is killed; also the limit for the start of a
    # worker
    worker_start_timeout_s: Annotated[float, Bounds(0.1)] = 60.0
    # failed starts in a row, with no child process left, after which the worker exits with the reason; 3 if
    # no child process ever started
    worker_start_attempts: Annotated[int, Bounds(1)] = 10
    # replace a child process after this many tasks
    worker_max_tasks_per_child: Annotated[int | None, Bounds(1)] = None
    # replace a child process that uses more memory, after its task; a plain number is in KiB, as in Celery;
    # `"200MB"` and `"1GiB"` name their unit
    worker_max_memory_per_child: int | str | None = None
    # kill a child process that uses more memory; its task is redelivered, and becomes a dead letter after
    # `task_max_deliveries` starts
    worker_max_memory_hard: int | str | None = None
    # connection and thread of remote control; `own`: separate, `shared`: the worker's, `auto`: separate in
    # green pools
    control_mailbox: Literal["auto", "shared", "own"] = "auto"
    # remote control commands that a worker accepts: `all`, `read-only`, or names
    control_allow: tuple[str, ...] = ("all",)
    # least interval between heartbeats; longer in clusters of more than 400 nodes. Unread heartbeats expire
    # after the same time
    heartbeat_interval_s: Annotated[float, Bounds(0.05)] = 2.0
    # send no heartbeats
    without_heartbeat: bool = False
    # do not exchange state with other nodes at the start
    without_mingle: bool = False
    # most seconds to wait for other nodes' answers at the start
    mingle_wait_s: Annotated[float, Bounds(0.01)] = 1.0
    # do not listen to the events of other nodes; with `election_protocol = "v1"` also no elections
    without_gossip: bool = False
    # `full`: every node reads every heartbeat; `observed`: three nodes read them for all
    gossip_mode: Literal["auto", "full", "observed"] = "auto"
    # how often to look for silent and lost nodes, and to review mode and observers; unset: silent and lost
    # nodes are found at once, the rest is reviewed every 5 s
    gossip_interval_s: Annotated[float | None, Bounds(0.05)] = None
    # this worker never sends the periodic tasks
    without_schedule: bool = False
    # most seconds until another worker replaces a dead sender of periodic tasks
    scheduler_lease_s: Annotated[float, Bounds(1)] = 10.0
    # `v1`: elections by Celery's rules, with events alone
    election_protocol: Literal["v2", "v1"] = "v2"
    # speak `v1` too in elections that a Celery client starts; `auto`: while Celery workers are in the cluster
    election_v1_compat: Literal["auto", "always", "never"] = "auto"

    def __repr__(self) -> str:
        """The settings without passwords, because the text may be printed and logged."""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.shown().items())})"

    def lake_mode_bits(self) -> int:
        """The setting `lake_mode` as a number."""
        return int(self.lake_mode, 8)

    def shown(self) -> dict[str, Any]:
        """Every setting as a plain value, without passwords, so that it may be shown."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        plain |= {name: without_password(plain[name]) for name in ("broker", "backend", "coordination_store")}
        plain["outbox"] = [without_password(url) for url in self.outboxes]
        return plain | {"signing_keys": shown_keys(self.signing_keys)}

    @property
    def outboxes(self) -> tuple[str, ...]:
        """The databases of `outbox`, as a tuple even for one."""
        return (self.outbox,) if isinstance(self.outbox, str) else self.outbox

    @property
    def keyring(self) -> Keyring | None:
        """The parsed signing keys; None without keys."""
        return keyring_of(self.signing_keys)

    def changed(self) -> frozenset[str]:
        """The names of settings that differ from their defaults."""
        defaults = Settings()
        return frozenset(name for name in _FIELDS if getattr(self, name) != getattr(defaults, name))

    def for_broker(self) -> BrokerSettings:
        """The settings that brokers and result backends are opened with."""
        shared = {name: getattr(self, name) for name in _OF_BROKER}
        return BrokerSettings(url=self.broker, keyring=self.keyring, **shared)


def _split(kind: Any) -> tuple[Any, Bounds | None]:
    """The plain type of a field, and the bounds that it is annotated with."""
    return get_args(kind) if get_origin(kind) is Annotated else (kind, None)


_FIELDS = {field.name: _split(field.type) for field in msgspec.structs.fields(Settings)}
_OF_BROKER = frozenset(_FIELDS).intersection(BrokerSettings.__struct_fields__)
_SECRET = frozenset({"signing_keys"})  # errors do not show their values
# Shown without passwords.
_ADDRESSES = frozenset({"broker", "backend", "coordination_store", "outbox", "history_lake"})
HIDDEN = "***"


def assemble(given: Mapping[str, Any], *, directory: Path | None = None) -> Settings:
    """The settings of an app constructed with `given`, looked up from `directory`; None: the current one.

    BadSetting, UnknownSetting: a value or name is wrong; ConfigurationError: a file cannot be read.
    """
    start = directory or _current_directory()
    values: dict[str, Any] = {}
    pyproject, table = _find_table(start)
    if pyproject is not None:
        values |= _checked(table, source=f"[tool.umbel] of {pyproject}")
    constructed = {name: value for name, value in given.items() if value is not None}
    values |= _checked(constructed, source="App(...)")
    values |= _from_environment(os.environ)
    home = pyproject.parent if pyproject is not None else start
    broker = _anchored(values.get("broker") or f"sqlite:///{EMBEDDED_FILE}", home)
    store = _anchored(values.get("coordination_store") or "", home)
    backend = _anchored(values.get("backend") or store or broker, home)
    outbox = values.get("outbox") or ()
    placed = (
        _anchored(outbox, home) if isinstance(outbox, str) else tuple(_anchored(url, home) for url in outbox)
    )
    placed_urls = {"broker": broker, "backend": backend, "coordination_store": store, "outbox": placed}
    return Settings(**values | placed_urls)


def _current_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError("the current directory was removed; change to one that exists") from None


def override(settings: Settings, **flags: Any) -> Settings:
    """The settings, overridden by the flags of a command; a flag that is None was not given."""
    return with_others(settings, flags, source="the command line")


def with_others(settings: Settings, others: Mapping[str, Any], *, source: str) -> Settings:
    """The settings, overridden by others from `source`; None means not given."""
    given = {name: value for name, value in others.items() if value is not None}
    return msgspec.structs.replace(settings, **_checked(given, source=source))


def _anchored(url: str, home: Path) -> str:
    """The URL with a relative file of the embedded broker made absolute, below the project."""
    relative = url.removeprefix("sqlite:///")
    if relative == url or relative.startswith("/") or not relative:
        return url
    return f"sqlite:///{home.resolve() / relative}"


def _checked(values: Mapping[str, Any], *, source: str, strict: bool = True) -> dict[str, Any]:
    return {name: _value(name, value, source=source, strict=strict) for name, value in values.items()}


def _value(name: str, value: Any, *, source: str, strict: bool) -> Any:
    if name not in _FIELDS:
        raise UnknownSetting(name, _FIELDS, source=source)
    kind, bounds = _FIELDS[name]
    try:
        converted = msgspec.convert(value, kind, strict=strict)
        if name == "history_lake":
            return lake_place(converted)
        problem = _problem(name, converted, bounds)
        if not problem:
            return converted
    except msgspec.ValidationError as error:
        problem = _wanted(name, value, kind) or str(error)
    except ValueError as error:  # of `lake_place` or `size_bytes`
        problem = str(error)
    raise BadSetting(name, _shown_value(name, value), problem, source=source)


def _problem(name: str, value: Any, bounds: Bounds | None) -> str | None:
    if value is None:
        return None
    match name:
        case "signing_keys":
            return key_problem(value)
        case "signing_cluster":
            return cluster_problem(value) if value else None
        case "worker_max_memory_per_child" | "worker_max_memory_hard":
            size_bytes(value)
        case "worker_autoscale" if not 1 <= value[1] <= value[0]:
            return "must be MAX,MIN with MAX >= MIN >= 1"
        case "lake_mode" if not re.fullmatch("0?7[0-7]{2}", value):
            return "must be an octal mode that begins with 07, such as 0750"
    return None if bounds is None else bounds.problem(value)


def _shown_value(name: str, value: Any) -> Any:
    """The value as it may be shown in an error."""
    if name not in _SECRET | _ADDRESSES:
        return value
    if name in _ADDRESSES and isinstance(value, str):
        return without_password(value)
    if name in _ADDRESSES and isinstance(value, list | tuple):
        return [_shown_value(name, item) for item in value]
    return value if isinstance(value, int | float | None) and name in _ADDRESSES else HIDDEN


def _wanted(name: str, value: Any, kind: Any) -> str:
    """The values that a setting accepts, if a few words can say it."""
    if isinstance(value, str) and (name, value) in _REFUSED:
        return _REFUSED[name, value]
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        return f"must be one of {', '.join(choices)}"
    kinds = {_KINDS[choice] for choice in choices or (kind,) if choice in _KINDS}
    return f"must be {' or '.join(sorted(kinds))}" if kinds else ""


_REFUSED: Mapping[tuple[str, str], str] = {
    ("worker_pool", "eventlet"): (
        "eventlet is not supported: its own authors advise against it for new code; use gevent, "
        "which runs the same kind of tasks, or asyncio"
    ),
}
_KINDS: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


_UNITS = {"": 1024, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_UNITS |= {"k": 1024, "m": 1024**2, "g": 1024**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def size_bytes(size: int | str | None) -> int | None:
    """The bytes of a memory size: `200000` is in KiB, as in Celery; `200MB` has its unit.

    ValueError: it is no size.
    """
    if size is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise ValueError(
            "must be a size: a number of KiB, or a number with its unit, such as 200MB or 1.5GiB"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def wrong_variables(environment: Mapping[str, str]) -> Iterator[ConfigurationError]:
    """Yield an error for each `UMBEL_*` variable that cannot be used."""
    for variable, text in _variables(environment):
        try:
            _from_variable(variable, text)
        except ConfigurationError as error:
            yield error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return dict(_from_variable(variable, text) for variable, text in _variables(environment))


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in ENVIRONMENT_RESERVED:
            yield variable, text


def _from_variable(variable: str, text: str) -> tuple[str, Any]:
    name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    source = f"the environment ({variable})"
    return name, _value(name, _parsed(name, text, source), source=source, strict=False)


def _parsed(name: str, text: str, source: str) -> Any:
    """Tables are written as JSON in a variable, lists as JSON or with commas, everything else unchanged."""
    if name == "task_routes" or text.startswith("["):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise BadSetting(name, _shown_value(name, text), f"not JSON ({error})", source=source) from None
    if name in _FIELDS and str(_FIELDS[name][0]).startswith("tuple"):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _find_table(start: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """The nearest pyproject.toml with a table [tool.umbel], and that table."""
    for directory in (start, *start.parents):
        candidate = directory / "pyproject.toml"
        if candidate.is_file() and (table := _table(candidate)) is not None:
            return candidate, table
    return None, {}


def _table(path: Path) -> Mapping[str, Any] | None:
    import tomllib  # only where there is a file to read

    try:
        with path.open("rb") as file:
            found: Any = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"cannot read the settings in {path}: {error}") from None
    for name in ("tool", "umbel"):
        found = found.get(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{name!r} in {path} is {found!r}: it must be a table")
    table: Mapping[str, Any] = found
    return table
