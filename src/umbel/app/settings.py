"""Settings: every option of an app, typed, in one place; the only reader of environment and files.

Later sources win: the defaults below, `[tool.umbel]` of the nearest pyproject.toml, the constructor of `App`,
`UMBEL_*` variables, and last the flags of a command. An operator can so change what a developer wrote without
touching the code.

An unknown name or a value of the wrong type is refused at once, with the nearest known name.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from umbel.brokers.interface import BrokerSettings
from umbel.errors import BadSetting, ConfigurationError, UnknownSetting
from umbel.protocol.delivery.trust import SIGNING_WINDOW_MAX_S
from umbel.text import lake_place, without_password
from umbel.wire.message import TIME_LIMIT_MAX_S
from umbel.wire.signing import Keyring, cluster_problem, key_problem, keyring_of, shown_keys

# ---- sizes of memory as people write them ----------------------------------------------------------
#
# `200000` is in KiB, as in Celery; `200MB` has its unit.

_UNITS = {"": 1024, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_UNITS |= {"k": 1024, "m": 1024**2, "g": 1024**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def size_bytes(name: str, size: int | str | None, *, source: str = "the settings") -> int | None:
    """The bytes that the setting `name` stands for; None when it is not set."""
    if size is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        problem = "must be a size: a number of KiB, or a number with its unit, such as 200MB or 1.5GiB"
        raise BadSetting(name, size, problem, source=source)
    return int(float(found[1]) * _UNITS[found[2]])


# ---- settings --------------------------------------------------------------------------------------
#
# Every option of an app, typed, in one place; the only reader of environment and files.
#
# Later sources win: the defaults below, `[tool.umbel]` of the nearest pyproject.toml, the constructor of
# `App`, `UMBEL_*` variables, and last the flags of a command. An operator can so change what a developer
# wrote without touching the code.
#
# An unknown name or a value of the wrong type is refused at once, with the nearest known name.

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


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of an app, with its default. Names end in their unit; the comment says what is not
    obvious.
    """

    broker: str = ""  # "": the embedded broker in umbel.db
    backend: str = ""  # "": where the broker is, if that can hold results
    coordination_store: str = ""  # a second broker, which does what Pub/Sub cannot

    task_default_queue: str = "celery"
    task_default_priority: int = 0
    task_routes: dict[str, str | dict[str, Any]] = {}
    task_serializer: Literal["json", "msgpack", "pickle"] = "json"
    accept_content: tuple[str, ...] = ("json",)
    task_ignore_result: bool = False
    task_acks_late: bool = True
    task_time_limit_s: float | None = None
    task_soft_time_limit_s: float | None = None
    task_max_deliveries: int = 3  # starts that end in a dead process, before the dead letters
    task_always_eager: bool = False
    task_allow_join: bool = False  # let tasks wait for other tasks' results
    task_send_sent_event: bool = False
    task_send_events: bool = False  # the worker's -E
    task_repr_max_chars: int = 1024  # of arguments and results, as events and logs show them
    task_traceback_max_bytes: int = 64 * 1024
    message_max_bytes: int = 16 * 1024 * 1024
    publish_timeout_s: float = 4.0  # a sender waits so long for an unavailable broker; 0: not at all
    publish_buffer_max: int = 1000  # messages that a running task may buffer meanwhile
    signing_keys: tuple[str, ...] = ()  # ID:SECRET; the first signs, all verify
    signing_cluster: str = ""  # what signatures are bound to; "": the id that the broker has
    signing_window_s: float = 86_400.0  # a signed task may wait so long; each signature is known for longer
    signing_accept_unbound: bool = True  # what Umbel 0.3 signed, for one window; off in the next release
    accept_unsigned: tuple[str, ...] = ()  # queues whose messages need no signature; "*": all

    result_expires_s: float = 86_400.0
    result_extended: bool = False
    failed_keep: int = 10_000  # messages of failed tasks, to be retried; 0: none
    failed_keep_s: float = 7 * 86_400.0
    failed_keep_max_bytes: int = 64 * 1024  # larger ones are not retained

    worker_concurrency: int | None = None  # None: the number of cores
    worker_pool: Literal["prefork", "solo", "threads", "asyncio", "gevent"] = "prefork"
    worker_loop: Literal["auto", "asyncio", "uvloop"] = "auto"  # auto: uvloop's where it is installed
    worker_gevent_children: int = 1  # processes that share the greenlets
    worker_queues: tuple[str, ...] = ()  # (): the default queue
    worker_prefetch_max: int = 1000
    worker_grace_s: float = 30.0  # a stopping worker waits so long for running tasks
    worker_soft_grace_s: float = 5.0  # after a second stop signal, for the interrupted tasks
    worker_hook_timeout_s: float = 10.0  # for each of worker_init, worker_ready and worker_shutdown
    worker_child_start: Literal["auto", "fork", "spawn"] = "auto"
    worker_autoscale: tuple[int, int] | None = None  # the most children and the least
    worker_autoscale_cool_down_s: float = 30.0  # a surplus child idles so long before it is stopped
    worker_redirect_stdouts: bool = True  # what tasks print goes to the log
    worker_redirect_stdouts_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    worker_log_successes: bool = False  # at INFO; without it at DEBUG
    worker_pool_restarts: bool = False  # allow the command pool_restart
    worker_start_timeout_s: float = 60.0  # for a child to be ready
    worker_start_attempts: int = 10  # failures in a row, with no child running: then the worker ends
    worker_max_tasks_per_child: int | None = None
    worker_max_memory_per_child: int | str | None = None  # in KiB, or "200MB": replaced after its task
    worker_max_memory_hard: int | str | None = None  # likewise, but killed, and the task with it
    control_mailbox: Literal["auto", "shared", "own"] = "auto"  # own: a connection and a thread for it
    control_allow: tuple[str, ...] = ("all",)  # or "read-only" and names of commands
    heartbeat_interval_s: float = 2.0  # at least; it grows with the cluster
    without_heartbeat: bool = False
    without_mingle: bool = False
    mingle_wait_s: float = 1.0  # most seconds that a starting worker waits for its peers' answers
    without_gossip: bool = False
    gossip_interval_s: float | None = None  # None: lost nodes are found at once
    gossip_mode: Literal["auto", "full", "observed"] = "auto"

    without_schedule: bool = False  # this worker sends no periodic tasks
    scheduler_lease_s: float = 10.0  # most seconds until a dead scheduler is replaced
    election_protocol: Literal["v2", "v1"] = "v2"  # v1: Celery's, by events alone
    election_v1_compat: Literal["auto", "always", "never"] = "auto"  # speak v1 next to Celery's workers

    connect_timeout_s: float = 4.0  # for the broker to answer, or the embedded one's file to be free
    broker_connection_wait_s: float = 60.0  # a starting worker waits so long for an unavailable broker
    lease_s: float = 10.0  # after so much silence a worker's messages are redelivered
    storage_max_bytes: int | None = None  # of the embedded broker's file
    history_lake: str = "umbel-lake"  # a folder, relative to where the command runs, or s3://
    lake_mode: str = "0700"  # octal: the mode of the lake's folders
    worker_record: bool = False  # workers have the history written, one of them at a time
    worker_metrics: str = ""  # PORT or HOST:PORT, where Prometheus finds what a worker counts
    outbox: str | tuple[str, ...] = ()  # databases in which tasks are sent by transactions
    outbox_table: str = "umbel_outbox"
    outbox_poll_s: float = 0.25  # most seconds between looks into an idle outbox
    event_log_max: int = 1_000_000
    event_log_retention_s: float = 7 * 86_400.0
    revokes_max: int = 1_000_000  # each worker holds them in memory
    revoke_retention_s: float = 7 * 86_400.0  # a revoke holds so long

    def __repr__(self) -> str:
        """Without passwords, because it is printed and logged."""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.shown().items())})"

    def lake_mode_bits(self) -> int:
        """The setting `lake_mode` as a number."""
        return int(self.lake_mode, 8)

    def shown(self) -> dict[str, Any]:
        """Every setting as it may be shown to others: plain values, no passwords."""
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
        return frozenset(name for name in _TYPES if getattr(self, name) != getattr(defaults, name))

    def for_broker(self) -> BrokerSettings:
        """The settings that brokers and result backends are opened with."""
        return BrokerSettings(
            message_max_bytes=self.message_max_bytes,
            url=self.broker,
            lease_s=self.lease_s,
            connect_timeout_s=self.connect_timeout_s,
            result_expires_s=self.result_expires_s,
            event_log_max=self.event_log_max,
            event_log_retention_s=self.event_log_retention_s,
            revokes_max=self.revokes_max,
            revoke_retention_s=self.revoke_retention_s,
            failed_keep=self.failed_keep,
            failed_keep_s=self.failed_keep_s,
            storage_max_bytes=self.storage_max_bytes,
            keyring=self.keyring,
            signing_cluster=self.signing_cluster,
            coordination_store=self.coordination_store,
        )


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}
_AT_LEAST: Mapping[str, float] = {
    "worker_concurrency": 1,
    "worker_gevent_children": 1,
    "worker_prefetch_max": 1,
    "task_max_deliveries": 1,
    "task_repr_max_chars": 64,
    "task_traceback_max_bytes": 1024,
    "message_max_bytes": 1024,
    "publish_timeout_s": 0,
    "publish_buffer_max": 0,
    "signing_window_s": 1,
    "connect_timeout_s": 0.01,
    "broker_connection_wait_s": 0,
    "lease_s": 0.1,
    "scheduler_lease_s": 1,
    "heartbeat_interval_s": 0.05,
    "gossip_interval_s": 0.05,
    "mingle_wait_s": 0.01,
    "result_expires_s": 0,
    "failed_keep": 0,
    "failed_keep_s": 1,
    "failed_keep_max_bytes": 1024,
    "worker_grace_s": 0,
    "worker_soft_grace_s": 0,
    "worker_hook_timeout_s": 0,
    "worker_start_timeout_s": 0.1,
    "worker_start_attempts": 1,
    "worker_autoscale_cool_down_s": 0,
    "worker_max_tasks_per_child": 1,
    "outbox_poll_s": 0.01,
    "event_log_max": 1,
    "event_log_retention_s": 0,
    "revokes_max": 1,
    "revoke_retention_s": 1,
    "task_default_priority": 0,
    "storage_max_bytes": 64 * 1024,
    "task_time_limit_s": 0.001,
    "task_soft_time_limit_s": 0.001,
}
_SECRET = frozenset({"signing_keys"})  # errors do not show their values
_ADDRESSES = frozenset({"broker", "backend", "coordination_store", "outbox"})  # shown without passwords
HIDDEN = "***"
_SIZES = frozenset({"worker_max_memory_per_child", "worker_max_memory_hard"})
_AT_MOST: Mapping[str, float] = {
    "signing_window_s": SIGNING_WINDOW_MAX_S,
    "failed_keep": 100_000,
    "failed_keep_s": 49 * 86_400.0,  # RabbitMQ allows no longer time
    "revokes_max": 5_000_000,  # RabbitMQ's stream of revokes holds about so many
    "revoke_retention_s": 365 * 86_400.0,
    "task_default_priority": 9,
    "task_time_limit_s": TIME_LIMIT_MAX_S,
    "task_soft_time_limit_s": TIME_LIMIT_MAX_S,
}


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
    """The settings with a command's flags on top; a flag that is None was not given."""
    return with_others(settings, flags, source="the command line")


def with_others(settings: Settings, others: Mapping[str, Any], *, source: str) -> Settings:
    """The settings with others on top, from `source`; None means not given."""
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
    if name not in _TYPES:
        raise UnknownSetting(name, _TYPES, source=source)
    shown = _shown_value(name, value)
    try:
        converted = msgspec.convert(value, _TYPES[name], strict=strict)
    except msgspec.ValidationError as error:
        raise BadSetting(name, shown, _wanted(name, value) or str(error), source=source) from None
    if name == "signing_keys" and (problem := key_problem(converted)):
        raise BadSetting(name, shown, problem, source=source)
    if name == "signing_cluster" and converted and (problem := cluster_problem(converted)):
        raise BadSetting(name, shown, problem, source=source)
    if name in _SIZES:
        size_bytes(name, converted, source=source)
    if name == "worker_autoscale" and converted is not None and not 1 <= converted[1] <= converted[0]:
        raise BadSetting(name, value, "must be MAX,MIN with MAX >= MIN >= 1", source=source)
    if name == "history_lake":
        return _lake(name, converted, source=source)
    if name == "lake_mode" and not re.fullmatch("0?7[0-7]{2}", converted):
        raise BadSetting(
            name, value, "must be an octal mode that begins with 07, such as 0750", source=source
        )
    least, most = _AT_LEAST.get(name), _AT_MOST.get(name)
    # Not `converted < least`, which is false for NaN.
    if least is not None and converted is not None and not converted >= least:
        raise BadSetting(name, value, f"must be at least {least}", source=source)
    if most is not None and converted is not None and not converted <= most:
        raise BadSetting(name, value, f"must be at most {most}", source=source)
    return converted


def _lake(name: str, value: str, *, source: str) -> str:
    try:
        return lake_place(value)
    except ValueError as error:
        raise BadSetting(name, without_password(value), str(error), source=source) from None


def _shown_value(name: str, value: Any) -> Any:
    """The value as it may be shown in an error."""
    if name not in _SECRET | _ADDRESSES:
        return value
    if name in _ADDRESSES and isinstance(value, str):
        return without_password(value)
    if name in _ADDRESSES and isinstance(value, list | tuple):
        return [_shown_value(name, item) for item in value]
    return value if isinstance(value, int | float | None) and name in _ADDRESSES else HIDDEN


def _wanted(name: str, value: Any) -> str:
    """What a setting takes, where that fits in a few words."""
    if isinstance(value, str) and (name, value) in _REFUSED:
        return _REFUSED[name, value]
    choices = get_args(_TYPES[name])
    if get_origin(_TYPES[name]) is Literal:
        return f"must be one of {', '.join(choices)}"
    kinds = {_KINDS[kind] for kind in choices or (_TYPES[name],) if kind in _KINDS}
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
    if str(_TYPES.get(name)).startswith("tuple"):
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
