"""Topology: every exchange and queue on RabbitMQ, as data, and why it is as it is.

What Celery declares is declared exactly as Celery does (wire-protocol 3): RabbitMQ compares, and
closes the channel if they differ. Umbel's names begin with `umbel.`, and Celery never sees them.

    celery                     a task queue, durable, bound to the direct exchange of its name
    celeryev                   topic exchange of events; each listener has one queue
    celery.pidbox              fanout exchange of control requests; one mailbox a node
    reply.celery.pidbox        direct exchange of their replies
    umbel.delay.<queue>.<ms>   messages not yet due: a quorum queue whose TTL hands them on to
                               <queue>; one for each step of the ladder, made when first needed
    umbel.dead                 dead letters
    umbel.revokes              stream: the durable record of revoked tasks
    umbel.starts               stream: starts counted against suspect messages
    umbel.signatures           stream: signatures that were used, where messages are signed
    umbel.facts                stream: queues, which are paused, recorders, leases and elections
    umbel.clock                stream: the clock mark; short, because only the highest counts
    umbel.events               stream: the durable event log, written while a recorder is registered;
                               for as long it is bound to celeryev too, so that Celery's events are in it
    umbel.hold.<what>          exclusive queue: somebody's connection holds this
    celery_delayed_<0 to 27>   Celery's ladder of delays, where a project has quorum queues (`declared.py`)

A stream is a queue that is read without taking anything from it, by everyone, from any place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from umbel.brokers.amqp.frames import Method
from umbel.brokers.interface import BrokerSettings
from umbel.protocol.delivery.trust import SIGNING_WINDOW_MAX_S

DEAD = "umbel.dead"
REVOKES, STARTS, SIGNATURES, FACTS, CLOCK, EVENTS = (
    "umbel.revokes",
    "umbel.starts",
    "umbel.signatures",
    "umbel.facts",
    "umbel.clock",
    "umbel.events",
)
EVENT_EXCHANGE, CONTROL_EXCHANGE, REPLY_EXCHANGE = "celeryev", "celery.pidbox", "reply.celery.pidbox"

EVENT_TTL_MS, EVENT_QUEUE_EXPIRES_MS = 5_000, 60_000
MAILBOX_TTL_MS, MAILBOX_EXPIRES_MS = 300_000, 10_000
RESULT_QUEUE_EXPIRES_MS = 86_400_000
DELAY_STEPS_MS = tuple(50 * 4**step for step in range(14))  # 50 ms, 200 ms, 800 ms, ... 39 days
EVENT_BYTES = 1000  # of one logged event, generously

_CLOCK_BYTES, _FACTS_BYTES, _LARGE_BYTES = 1_000_000, 20_000_000, 1_000_000_000

Call = tuple[Method, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Without a `kind` it is only asked for: somebody else makes it."""

    name: str
    kind: str
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def calls(self) -> list[Call]:
        if not self.name or self.name.startswith("amq."):  # RabbitMQ's own
            return []
        if not self.kind:
            return [self.passive()]
        flags = (False, self.durable, self.auto_delete, False, False)
        return [(Method.EXCHANGE_DECLARE, (0, self.name, self.kind, *flags, dict(self.arguments)))]

    def passive(self) -> Call:
        return Method.EXCHANGE_DECLARE, (0, self.name, "", True, False, False, False, False, {})


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: Exchange
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Queue:
    """Bound to one exchange by its `keys`, and in any way by `bindings`. All nodes know of task queues."""

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    exchange: Exchange | None = None
    keys: tuple[str, ...] = ()
    bindings: tuple[Binding, ...] = ()
    is_task: bool = False
    no_declare: bool = False

    def calls(self) -> list[Call]:
        """What declares it with its exchanges and bindings, in order."""
        if self.no_declare:
            return [passive(self.name)]
        flags = (False, self.durable, self.exclusive, self.auto_delete, False)
        declare: Call = (Method.QUEUE_DECLARE, (0, self.name, *flags, dict(self.arguments)))
        return [*self._exchanges(), declare, *self._bindings()]

    def binding_calls(self) -> list[Call]:
        """What binds it to its exchanges again, which may have been deleted."""
        return [*self._exchanges(), *self._bindings()]

    def _all_bindings(self) -> list[Binding]:
        plain = [] if self.exchange is None else [Binding(self.exchange, key) for key in self.keys]
        return [*plain, *self.bindings]

    def _exchanges(self) -> list[Call]:
        exchanges = {one.exchange.name: one.exchange for one in self._all_bindings()}
        return [call for exchange in exchanges.values() for call in exchange.calls()]

    def _bindings(self) -> list[Call]:
        return [
            (Method.QUEUE_BIND, (0, self.name, one.exchange.name, one.key, False, dict(one.arguments)))
            for one in self._all_bindings()
            if one.exchange.name  # every queue is bound to the exchange without a name
        ]


def passive(name: str) -> Call:
    """Ask for a queue without making it."""
    return Method.QUEUE_DECLARE, (0, name, True, False, False, False, False, {})


def task_queue(name: str) -> Queue:
    return Queue(name, exchange=Exchange(name, "direct"), keys=(name,), is_task=True)


def exchange(name: str) -> Exchange:
    """An exchange to broadcast on. One that Celery does not know is like that of the events."""
    if name == CONTROL_EXCHANGE:
        return Exchange(name, "fanout", durable=False)
    if name == REPLY_EXCHANGE:
        return Exchange(name, "direct", durable=False)
    return Exchange(name, "topic")


def listening_queue(
    exchange_name: str, keys: tuple[str, ...], unique: str, *, unread_ttl_s: float | None = None
) -> Queue:
    """The queue of one listener, as Celery 5.7 has it: exclusive, gone with its connection.

    A node's mailbox is named after the node, so that others can ask whether it lives: its key is
    then the node's name. The key of replies names the asker.
    """
    of = exchange(exchange_name)
    if exchange_name in (CONTROL_EXCHANGE, REPLY_EXCHANGE):
        is_node = exchange_name == CONTROL_EXCHANGE and len(keys) == 1 and "@" in keys[0]
        name = keys[0] if is_node or exchange_name == REPLY_EXCHANGE else unique
        arguments = {"x-expires": MAILBOX_EXPIRES_MS, "x-message-ttl": MAILBOX_TTL_MS}
        bound = ("",) if exchange_name == CONTROL_EXCHANGE else keys
        return Queue(f"{name}.{exchange_name}", False, True, True, arguments, of, bound)
    ttl_ms = EVENT_TTL_MS if unread_ttl_s is None else max(1, round(unread_ttl_s * 1000))
    arguments = {"x-expires": EVENT_QUEUE_EXPIRES_MS, "x-message-ttl": ttl_ms}
    return Queue(f"{exchange_name}.{unique}", False, True, True, arguments, of, keys)


def mailbox(node: str) -> str:
    return f"{node}.{CONTROL_EXCHANGE}"


def result_queue(name: str) -> Queue:
    """Where a client receives results (wire 6.3)."""
    return Queue(name, auto_delete=True, arguments={"x-expires": RESULT_QUEUE_EXPIRES_MS})


def delay_step_ms(delay_s: float) -> int | None:
    """The longest step of the ladder that does not overshoot; None: too short to be worth one."""
    fitting = [step for step in DELAY_STEPS_MS if step <= delay_s * 1000]
    return fitting[-1] if fitting else None


def delay_queue(queue: str, step_ms: int) -> Queue:
    """One step: after its time the message is in its queue, confirmed there before it leaves here."""
    return Queue(
        f"umbel.delay.{queue}.{step_ms}",
        arguments={
            "x-queue-type": "quorum",
            "x-message-ttl": step_ms,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": queue,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )


def dead_letter_queue() -> Queue:
    return Queue(DEAD)


def stream(name: str, *, max_bytes: int, max_age_s: float | None = None) -> Queue:
    arguments: dict[str, Any] = {
        "x-queue-type": "stream",
        "x-max-length-bytes": max_bytes,
        "x-stream-max-segment-size-bytes": max(max_bytes // 10, 100_000),
    }
    if max_age_s is not None:
        arguments["x-max-age"] = f"{max(1, round(max_age_s))}s"
    return Queue(name, arguments=arguments)


def streams(settings: BrokerSettings) -> list[Queue]:
    """The streams that every broker follows.

    Facts and the clock mark do not expire: they are written again before they fall off the end.
    """
    age_s = settings.revoke_retention_s
    signatures = [stream(SIGNATURES, max_bytes=_LARGE_BYTES, max_age_s=SIGNING_WINDOW_MAX_S)]
    return [
        *(signatures if settings.remembers_signatures else ()),
        stream(REVOKES, max_bytes=_LARGE_BYTES, max_age_s=age_s),
        stream(STARTS, max_bytes=_LARGE_BYTES, max_age_s=age_s),
        stream_of_facts(),
        stream(CLOCK, max_bytes=_CLOCK_BYTES),
    ]


def stream_of_facts() -> Queue:
    return stream(FACTS, max_bytes=_FACTS_BYTES)


def event_stream(settings: BrokerSettings) -> Queue:
    return stream(
        EVENTS,
        max_bytes=max(settings.event_log_max * EVENT_BYTES, 10_000_000),
        max_age_s=max(settings.event_log_retention_s, 3600.0),
    )


def event_binding() -> list[Call]:
    """The binding that copies every event into the event log, those of Celery's nodes too."""
    bind: Call = (Method.QUEUE_BIND, (0, EVENTS, EVENT_EXCHANGE, "#", False, {}))
    return [*exchange(EVENT_EXCHANGE).calls(), bind]


def event_unbinding() -> list[Call]:
    return [(Method.QUEUE_UNBIND, (0, EVENTS, EVENT_EXCHANGE, "#", {}))]


def hold_queue(what: str, ttl_s: float = 0.0) -> Queue:
    """It goes with its connection, and when it was not declared again for `ttl_s`."""
    return Queue(
        f"umbel.hold.{what}",
        durable=False,
        exclusive=True,
        arguments={"x-expires": max(1, round(ttl_s * 1000))},
    )
