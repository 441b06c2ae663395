"""Options: what each transport option of a Celery project means here.

There are three verdicts. *Mapped*: there is a setting of ours for it. *No effect*: it controls something that
Umbel does differently, and `why` says how. *Not supported*: the project would not work as configured, so the
option is refused by name, and so is every option that is not in the tables.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlencode, urlsplit

from umbel.brokers.interface.connection import BrokerSettings
from umbel.errors import NotSupported


class Support(StrEnum):
    """How far an option of Celery is supported."""

    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    UNSUPPORTED = "not supported"


@dataclass(frozen=True, slots=True)
class JudgedOption:
    """One option and its verdict; `changes` are fields of BrokerSettings."""

    name: str
    support: Support
    why: str
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class _Rule:
    why: str
    field: str = ""  # of BrokerSettings; empty: no effect
    read: Callable[[Any], Any] = lambda value: value
    allowed: tuple[Any, ...] | None = None  # other values are not supported
    unsupported: bool = False
    in_address: bool = False  # `with_sentinel` puts it there


def judge_options(url: str, options: Mapping[str, Any]) -> list[JudgedOption]:
    """Return the verdicts on `broker_transport_options` of a project whose broker is at this address."""
    if url.startswith("gcpubsub"):
        table = _PUBSUB
    else:
        table = _REDIS if url.startswith(("redis", "unix", "sentinel")) else _AMQP
    return [_judge(name, value, table) for name, value in options.items()]


def judge_result_options(options: Mapping[str, Any]) -> list[JudgedOption]:
    """Return the verdicts on `result_backend_transport_options`."""
    return [_judge(name, value, _RESULTS) for name, value in options.items()]


def changes_of(judged: list[JudgedOption]) -> dict[str, Any]:
    """Return the fields of BrokerSettings that the options set; NotSupported names unsupported options."""
    if refused := [option for option in judged if option.support is Support.UNSUPPORTED]:
        raise NotSupported("; ".join(f"transport option {option.name!r}: {option.why}" for option in refused))
    return {field: value for option in judged for field, value in option.changes}


def with_tls(url: str, use_ssl: bool | Mapping[str, Any] | None) -> str:
    """Return the address with the TLS options of `broker_use_ssl` or `redis_backend_use_ssl`.

    Names with and without `ssl_` mean the same, as in Celery, where each transport has its own.
    """
    if not use_ssl:
        return url
    options: dict[str, str] = {}
    for name, value in use_ssl.items() if isinstance(use_ssl, Mapping) else ():
        key = name if name.startswith("ssl_") else f"ssl_{name}"
        if key not in _TLS:
            raise NotSupported(
                f"unknown TLS option {name!r}; known are {', '.join(sorted(_TLS))}, with or without ssl_"
            )
        if value is not None:
            options[key] = _TLS[key](value)
    return ";".join(_encrypted(part.strip(), options) for part in url.split(";") if part.strip())


def with_sentinel(url: str, options: Mapping[str, Any]) -> str:
    """Return the address of sentinels, with the master's name and login from a project's transport
    options.
    """
    if not url.startswith("sentinel"):
        return url
    login = options.get("sentinel_kwargs") or {}
    stated = {"master_name": options.get("master_name")}
    stated |= {f"sentinel_{name}": login.get(name) for name in _SENTINEL_LOGIN}  # others are refused by name
    given = {name: str(value) for name, value in stated.items() if value is not None}
    return ";".join(_with_options(part.strip(), given) for part in url.split(";") if part.strip())


def _judge(name: str, value: Any, table: Mapping[str, _Rule]) -> JudgedOption:
    rule = table.get(name) or _ANY.get(name)
    if rule is None:
        return JudgedOption(name, Support.UNSUPPORTED, "unknown here; remove it, or say what needs it")
    if rule.unsupported or (rule.allowed is not None and value not in rule.allowed):
        shown = "" if rule.unsupported else f"{value!r}: "
        return JudgedOption(name, Support.UNSUPPORTED, shown + rule.why)
    if rule.in_address:
        others = set(value) - set(_SENTINEL_LOGIN) if isinstance(value, Mapping) else None
        return (
            JudgedOption(name, Support.UNSUPPORTED, f"{min(others)!r} in it: {_ONLY_LOGIN}")
            if others
            else JudgedOption(name, Support.MAPPED, rule.why)
        )
    if not rule.field or value is None:
        return JudgedOption(name, Support.NO_EFFECT, rule.why)
    return JudgedOption(name, Support.MAPPED, rule.why, ((rule.field, rule.read(value)),))


def _fanout_prefix(value: bool | str) -> str:
    """Return the prefix for an option that is True (the default), False (no prefix), or the prefix itself."""
    if isinstance(value, str):
        return value
    return BrokerSettings("").fanout_prefix if value else ""


def _steps(value: Iterable[Any]) -> tuple[int, ...]:
    return tuple(sorted({int(step) for step in value} | {0}))


def _result_prefix(value: str) -> str:
    """Return the prefix in Celery's form: with an underscore if it ends in no separator."""
    return value if not value or value.endswith((":", "_", "-", ".")) else f"{value}_"


def _encrypted(url: str, options: Mapping[str, str]) -> str:
    scheme, _, rest = url.partition("://")
    encrypted = {"redis": "rediss", "sentinel": "sentinels", "amqp": "amqps", "pyamqp": "amqps"}
    return _with_options(f"{encrypted.get(scheme, scheme)}://{rest}", options)


def _with_options(url: str, options: Mapping[str, str]) -> str:
    if not options:
        return url
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(options)}"


def _cert_reqs(value: Any) -> str:
    """Return `required` or `none`, from a number of the ssl module, its name, or Celery's word for it."""
    text = str(getattr(value, "name", value)).lower().removeprefix("cert_")
    text = {"0": "none", "1": "optional", "2": "required"}.get(text, text)
    if text not in ("none", "required"):
        raise NotSupported(f"TLS option 'cert_reqs' is {value!r}: write CERT_REQUIRED or CERT_NONE")
    return text


_TLS: Mapping[str, Callable[[Any], str]] = {
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": _cert_reqs,
    "ssl_check_hostname": lambda value: str(bool(value)).lower(),
}


def _same(rule: _Rule, names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_LEASES = "a message belongs to its worker by a lease (lease_s); one that is lost is redelivered after that"
_UNACKED = "it names what Celery's workers hold; ours is held under other keys"
_OWN_CONNECTIONS = "our connections have their own time-outs and find out by themselves when one is dead"
_SENTINEL_LOGIN = ("username", "password")
_SENTINEL = "a part of the address: sentinel://host:26379/0?master_name=NAME"
_ONLY_LOGIN = f"supported are {' and '.join(_SENTINEL_LOGIN)}; for TLS use broker_use_ssl"
_SENTINELS = "write the addresses of the sentinels into broker_url, joined by ';'"
_NO_COMPAT = "clients and workers need Kombu 5.4 or later, which name channels as without sentinels"
_NO_COUNT = "sentinels are asked in turn, and the server that one names must say that it is the primary"
_CALLBACK = "Umbel does not call functions of the AMQP library"
_LOGIN = "Umbel logs in with the user and password of the address"
_CLIENTS = "it is about how a client publishes; that stays with Celery"
_ANY = {
    **_same(_Rule(_CLIENTS), "max_retries interval_start interval_step interval_max"),
    "queue_order_strategy": _Rule("messages come by priority, and queues take turns"),
    "visibility_timeout": _Rule(_LEASES),
    "polling_interval": _Rule("an idle worker is notified of messages and does not poll for them"),
}
_REDIS: Mapping[str, _Rule] = {
    "global_keyprefix": _Rule("before every key and channel", "key_prefix", str),
    "priority_steps": _Rule("one list for each", "priority_steps", _steps),
    "sep": _Rule("between the parts of keys", "sep", str),
    "fanout_prefix": _Rule("before the channels of events and control", "fanout_prefix", _fanout_prefix),
    "fanout_patterns": _Rule("Umbel needs patterns in channels: leave it at True", allowed=(True,)),
    "socket_connect_timeout": _Rule("to connect", "connect_timeout_s", float),
    "client_name": _Rule("shown by CLIENT LIST", "connection_name", str),
    "ack_emulation": _Rule("messages are always acknowledged: leave it at True", allowed=(True,)),
    **_same(_Rule(_UNACKED), "unacked_key unacked_index_key unacked_mutex_key"),
    **_same(_Rule(_LEASES), "unacked_mutex_expire unacked_restore_limit unacked_restore_interval"),
    "unacked_restore_throttle": _Rule(_LEASES),
    **_same(_Rule(_OWN_CONNECTIONS), "socket_timeout socket_keepalive socket_keepalive_options"),
    **_same(_Rule(_OWN_CONNECTIONS), "health_check_interval retry_on_timeout max_connections"),
    "reauth_check_interval": _Rule(_OWN_CONNECTIONS),
    "body_encoding": _Rule("both encodings are read"),
    "deadletter_queue": _Rule("what reaches no queue is among the dead letters (umbel dlq)"),
    **_same(_Rule(_SENTINEL, in_address=True), "master_name sentinel_kwargs"),
    "sentinels": _Rule(_SENTINELS, unsupported=True),
    "min_other_sentinels": _Rule(_NO_COUNT),
    "sentinel_fanout_compat": _Rule(_NO_COMPAT, allowed=(False, None)),
    "credential_provider": _Rule("write user and password into the address", unsupported=True),
}
_AMQP: Mapping[str, _Rule] = {
    "confirm_publish": _Rule("every message is confirmed by the server"),
    "connect_timeout": _Rule("to connect", "connect_timeout_s", float),
    **_same(_Rule(_OWN_CONNECTIONS), "read_timeout write_timeout socket_settings heartbeat"),
    **_same(_Rule(_OWN_CONNECTIONS), "channel_max frame_max client_properties locale"),
    "login_method": _Rule(_LOGIN, allowed=(None, "PLAIN", "AMQPLAIN")),
    **_same(_Rule(_LOGIN, unsupported=True), "authentication login_response"),
    **_same(_Rule(_CALLBACK, unsupported=True), "on_open on_blocked on_unblocked on_tune_ok"),
    **_same(_Rule("it is an option of Redis"), "global_keyprefix priority_steps sep"),
}
_PUBSUB: Mapping[str, _Rule] = {
    "queue_name_prefix": _Rule("before the names of subscriptions", "queue_name_prefix", str),
    "expiration_seconds": _Rule("an unused subscription is removed", "subscription_expires_s", float),
    "enable_exactly_once_delivery": _Rule("of subscriptions that are made here", "exactly_once", bool),
    **_same(_Rule(_LEASES), "ack_deadline_seconds ack_modify_batch_size"),
    **_same(_Rule(_OWN_CONNECTIONS), "wait_time_seconds retry_timeout_seconds"),
    "bulk_max_messages": _Rule("a worker pulls as many messages as it can take"),
}
_RESULTS: Mapping[str, _Rule] = {
    "global_keyprefix": _Rule("before the keys of results", "result_key_prefix", _result_prefix),
    "retry_policy": _Rule(_OWN_CONNECTIONS),
    "result_chord_ordered": _Rule("the parts of a chord keep their order: leave it at True", allowed=(True,)),
    **_same(_Rule(_OWN_CONNECTIONS), "socket_timeout retry_on_timeout health_check_interval"),
    **_same(_Rule(_SENTINEL, in_address=True), "master_name sentinel_kwargs"),
}
