"""Topology: every exchange and queue on RabbitMQ as data, and why it has its properties.

The task queues that a project declares, and what RabbitMQ can and cannot do, are here too.

What Celery declares is declared exactly as Celery does (wire-protocol 3): RabbitMQ compares, and closes the
channel if they differ. Umbel's names begin with `umbel.`, and Celery never sees them.

    celery                     a task queue, durable, bound to the direct exchange of its name
    celeryev                   topic exchange of events; each listener has one queue
    celery.pidbox              fanout exchange of control requests; one mailbox a node
    reply.celery.pidbox        direct exchange of their replies
    umbel.delay.<queue>.<ms>   messages not yet due: a quorum queue whose TTL moves them to
                               <queue>; one for each level of the ladder, created when first needed
    umbel.dead                 dead letters
    umbel.failed               messages of failed tasks, for a retry; the oldest are dropped
    umbel.revokes              stream: the durable record of revoked tasks
    umbel.starts               stream: starts counted against suspect messages, and which of them ended
    umbel.signatures           stream: signatures that were used, where messages are signed
    umbel.cluster              stream: the id that signatures are bound to; its first entry counts
    umbel.facts                stream: queues, which are paused, recorders, leases and elections
    umbel.clock                stream: the logical clock; short, because only the highest value counts
    umbel.events               stream: the durable event log, written while a recorder is registered;
                               during that time it is bound to celeryev too, so it has Celery's events
    umbel.hold.<what>          exclusive queue: a lock that one connection holds
    celery_delayed_<0 to 27>   Celery's ladder of delays, where a project has quorum queues

A stream is a queue that any number of clients read from any place, without removing anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from umbel.brokers.amqp.frames import Method
from umbel.brokers.interface import BrokerSettings, Capabilities, DeclaredExchange, DeclaredQueue
from umbel.brokers.interface.connection import why_reserved
from umbel.protocol.delivery.trust import SIGNING_WINDOW_MAX_S

# ---- topology --------------------------------------------------------------------------------------

DEAD, FAILED = "umbel.dead", "umbel.failed"
REVOKES, STARTS, SIGNATURES, CLUSTER, FACTS, CLOCK, EVENTS = (
    "umbel.revokes",
    "umbel.starts",
    "umbel.signatures",
    "umbel.cluster",
    "umbel.facts",
    "umbel.clock",
    "umbel.events",
)
EVENT_EXCHANGE, CONTROL_EXCHANGE, REPLY_EXCHANGE = "celeryev", "celery.pidbox", "reply.celery.pidbox"

DELAY_LADDER = tuple(f"celery_delayed_{level}" for level in range(28))
"""By level: Celery's queues for delays, each with an exchange of its name."""

EVENT_TTL_MS, EVENT_QUEUE_EXPIRES_MS = 5_000, 60_000
MAILBOX_TTL_MS, MAILBOX_EXPIRES_MS = 300_000, 10_000
RESULT_QUEUE_EXPIRES_MS = 86_400_000
DELAY_STEPS_MS = tuple(50 * 4**step for step in range(14))  # 50 ms, 200 ms, 800 ms, ... 39 days
TTL_MAX_MS = 2**32 - 1  # 49 days: RabbitMQ accepts no longer one
EVENT_BYTES = 1000  # of one logged event, rounded up

_CLOCK_BYTES, _FACTS_BYTES, _LARGE_BYTES = 1_000_000, 20_000_000, 1_000_000_000
_WEEK_S = 7 * 86_400.0

Call = tuple[Method, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange. Without a `kind` it is only checked for, because Umbel does not create it."""

    name: str
    kind: str
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def calls(self) -> list[Call]:
        """Return the calls that declare it; none for RabbitMQ's own exchanges."""
        if not self.name or self.name.startswith("amq."):  # RabbitMQ creates these itself
            return []
        if not self.kind:
            return [self.passive()]
        flags = (False, self.durable, self.auto_delete, False, False)
        return [(Method.EXCHANGE_DECLARE, (0, self.name, self.kind, *flags, dict(self.arguments)))]

    def passive(self) -> Call:
        """Return the call that checks that it exists, without creating it."""
        return Method.EXCHANGE_DECLARE, (0, self.name, "", True, False, False, False, False, {})


@dataclass(frozen=True, slots=True)
class Binding:
    """One exchange and routing key that a queue is bound to."""

    exchange: Exchange
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue, bound to one exchange by its `keys`, and in any way by `bindings`. Task queues are announced
    to all nodes.
    """

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
    reserved: str = ""  # why no task may be sent there: the name has another use

    def calls(self) -> list[Call]:
        """Return the calls that declare it with its exchanges and bindings, in order."""
        if self.no_declare:
            return [passive(self.name)]
        flags = (False, self.durable, self.exclusive, self.auto_delete, False)
        declare: Call = (Method.QUEUE_DECLARE, (0, self.name, *flags, dict(self.arguments)))
        return [*self._exchanges(), declare, *self._bindings()]

    def binding_calls(self) -> list[Call]:
        """Return the calls that bind it again to its exchanges, which may have been deleted."""
        return [*self._exchanges(), *self._bindings()]

    def _all_bindings(self) -> list[Binding]:
        plain = [] if self.exchange is None else [Binding(self.exchange, key) for key in self.keys]
        return [*plain, *self.bindings]

    def _exchanges(self) -> list[Call]:
        exchanges = {binding.exchange.name: binding.exchange for binding in self._all_bindings()}
        return [call for exchange in exchanges.values() for call in exchange.calls()]

    def _bindings(self) -> list[Call]:
        return [
            (
                Method.QUEUE_BIND,
                (0, self.name, binding.exchange.name, binding.key, False, dict(binding.arguments)),
            )
            for binding in self._all_bindings()
            if binding.exchange.name  # RabbitMQ binds every queue to the exchange without a name
        ]


def passive(name: str) -> Call:
    """Return the call that checks that a queue exists, without creating it."""
    return Method.QUEUE_DECLARE, (0, name, True, False, False, False, False, {})


def task_queue(name: str) -> Queue:
    """Return a task queue as Celery declares it by default."""
    return Queue(name, exchange=Exchange(name, "direct"), keys=(name,), is_task=True)


def exchange(name: str) -> Exchange:
    """Return an exchange to broadcast on. Exchanges that Celery does not know have the type of the event
    exchange.
    """
    if name == CONTROL_EXCHANGE:
        return Exchange(name, "fanout", durable=False)
    if name == REPLY_EXCHANGE:
        return Exchange(name, "direct", durable=False)
    return Exchange(name, "topic")


def listening_queue(
    exchange_name: str, keys: tuple[str, ...], unique: str, *, unread_ttl_s: float | None = None
) -> Queue:
    """Return the queue of one listener, in the form of Celery 5.7: exclusive, removed with its connection.

    A node's mailbox is named after the node, so that others can check whether the node is alive: its key is
    then the node's name. The key of replies names the asking client.
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
    """Return the name of the queue in which a node receives control requests."""
    return f"{node}.{CONTROL_EXCHANGE}"


def result_queue(name: str) -> Queue:
    """Return the queue in which a client receives results (wire 6.3)."""
    return Queue(name, auto_delete=True, arguments={"x-expires": RESULT_QUEUE_EXPIRES_MS})


def delay_step_ms(delay_s: float) -> int | None:
    """Return the longest level of the ladder that does not overshoot; None if the delay is shorter than every
    level.
    """
    fitting = [step for step in DELAY_STEPS_MS if step <= delay_s * 1000]
    return fitting[-1] if fitting else None


def delay_queue(queue: str, step_ms: int) -> Queue:
    """Return one level of the ladder. After its time the message moves to its queue, where it is confirmed
    before it leaves this one.
    """
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
    """Return the queue of dead letters, which has no limits."""
    return Queue(DEAD)


def failed_queue(settings: BrokerSettings) -> Queue:
    """Return the queue of failed tasks' messages. A queue that exists with other limits keeps them, because
    RabbitMQ does not change them.
    """
    ttl_ms = min(max(1, round(settings.failed_keep_s * 1000)), TTL_MAX_MS)
    limits = {
        "x-max-length": max(1, settings.failed_keep),
        "x-message-ttl": ttl_ms,
        "x-overflow": "drop-head",
    }
    return Queue(FAILED, arguments=limits)


def stream(name: str, *, max_bytes: int, max_age_s: float | None = None) -> Queue:
    """Return a stream with these limits, cut into at least ten segments, because RabbitMQ drops whole
    segments.
    """
    arguments: dict[str, Any] = {
        "x-queue-type": "stream",
        "x-max-length-bytes": max_bytes,
        "x-stream-max-segment-size-bytes": max(max_bytes // 10, 100_000),
    }
    if max_age_s is not None:
        arguments["x-max-age"] = f"{max(1, round(max_age_s))}s"
    return Queue(name, arguments=arguments)


def streams(settings: BrokerSettings) -> list[Queue]:
    """Return the streams that every broker follows.

    Facts and the clock do not expire: they are written again before they fall off the end.
    """
    # A shorter retention is in each entry, so that a stream that exists has the right arguments.
    revokes_age_s = max(settings.revoke_retention_s, _WEEK_S)
    return [
        *([stream_of_signatures()] if settings.remembers_signatures else ()),
        stream(REVOKES, max_bytes=_LARGE_BYTES, max_age_s=revokes_age_s),
        stream(STARTS, max_bytes=_LARGE_BYTES, max_age_s=_WEEK_S),
        stream_of_facts(),
        stream(CLOCK, max_bytes=_CLOCK_BYTES),
    ]


def stream_of_facts() -> Queue:
    """Return the stream of queues, pauses, recorders, leases and elections."""
    return stream(FACTS, max_bytes=_FACTS_BYTES)


def stream_of_signatures() -> Queue:
    """Return the stream of used signatures; its entries expire when no signature can still be valid."""
    return stream(SIGNATURES, max_bytes=_LARGE_BYTES, max_age_s=SIGNING_WINDOW_MAX_S)


def stream_of_cluster() -> Queue:
    """Return the stream whose first entry is the id of the cluster."""
    return stream(CLUSTER, max_bytes=_FACTS_BYTES)


def event_stream(settings: BrokerSettings) -> Queue:
    """Return the stream of the event log, within the configured limits."""
    return stream(
        EVENTS,
        max_bytes=max(settings.event_log_max * EVENT_BYTES, 10_000_000),
        max_age_s=max(settings.event_log_retention_s, 3600.0),
    )


def event_binding() -> list[Call]:
    """Return the calls that copy every event into the event log, those of Celery's nodes too."""
    bind: Call = (Method.QUEUE_BIND, (0, EVENTS, EVENT_EXCHANGE, "#", False, {}))
    return [*exchange(EVENT_EXCHANGE).calls(), bind]


def event_unbinding() -> list[Call]:
    """Return the calls that stop copying events into the event log."""
    return [(Method.QUEUE_UNBIND, (0, EVENTS, EVENT_EXCHANGE, "#", {}))]


def of_session(holder: str) -> str:
    """Return the name of the lock that a session holds while it is connected, so that others can check
    whether it is.
    """
    return f"session.{holder}"


def session_queue(holder: str) -> Queue:
    """Return the queue of that lock: it is removed with its connection, and never expires."""
    return Queue(f"umbel.hold.{of_session(holder)}", durable=False, exclusive=True)


def hold_queue(what: str, ttl_s: float = 0.0) -> Queue:
    """Return the queue of a lock: it is removed with its connection, or when it was not declared again for
    `ttl_s`.
    """
    return Queue(
        f"umbel.hold.{what}",
        durable=False,
        exclusive=True,
        arguments={"x-expires": max(1, round(ttl_s * 1000))},
    )


# ---- capabilities ----------------------------------------------------------------------------------

CAPABILITIES = Capabilities(
    transport="amqp",
    atomic_settle=False,
    stores_results=True,
    fanout=True,
    leases=True,
    delayed=True,
    event_log=True,
    priorities="9 first",
    events_of_others="log",
    reserved={
        "umbel.*": "Umbel's",
        "amq.*": "RabbitMQ's",
        **dict.fromkeys(DELAY_LADDER, "Celery's"),
        EVENT_EXCHANGE: "the exchange of events",
        CONTROL_EXCHANGE: "the exchange of control requests",
        REPLY_EXCHANGE: "the exchange of their replies",
    },
    reasons={
        "atomic_settle": "RabbitMQ cannot publish and acknowledge in one step: Umbel publishes first, then "
        "acknowledges",
        "atomic_publish": "a batch is sent in one piece and confirmed as a whole; if the publisher dies "
        "while sending a batch larger than the socket's buffer, part of it may be published",
        "stores_results": "results are sent to the client that asked for them (rpc) and are not stored",
        "ownership": "the connection is the lease: RabbitMQ requeues the messages of a dead process and "
        "closes silent connections; workers do not count these",
        "priorities": "Celery's queues have no x-max-priority, which cannot be added later: priorities "
        "order the messages that a worker has fetched; to order the whole queue, declare it with "
        "x-max-priority",
        "claimed": "AMQP does not show what other connections have claimed: only claims of this process "
        "are counted",
        "revokes": "a revoke reaches a busy worker some milliseconds after it was recorded; a worker that "
        "fetches messages reads new revokes first",
        "pause": "a pause reaches a busy worker some milliseconds after it was set; what it has fetched goes "
        "back to the queue",
        "move": "RabbitMQ cannot move a message in one step: Umbel publishes, and acknowledges when "
        "that is confirmed; a move that is killed may leave up to 100 messages in both queues",
        "unique": "RabbitMQ has no key that can be set atomically and expires, and a queue per key would "
        "outlive the task; use Redis or the embedded broker for unique tasks",
        "limits": "RabbitMQ has no value that can be compared and changed in one step; use Redis or the "
        "embedded broker for it, or rate_limit, which holds for each worker",
        "sent_once": "RabbitMQ cannot tell whether it has a message already: an awaited send that was cut "
        "off may have been sent, and sending it again may run it twice",
        "return_order": "RabbitMQ may deliver the next message before it has put a returned one back: "
        "a returned message is usually first in its queue, and seldom second",
        "fenced_publish": "RabbitMQ has no conditional publish: Umbel checks the lease just before it "
        "publishes; what a leader that died may have sent is sent again by the next one, as redelivered",
    },
)


# ---- declared --------------------------------------------------------------------------------------

DELAY_DELIVERY = Exchange("celery_delayed_delivery", "topic")
KNOWN_MAX = 1000
_LIMITED_BY_CONSUMER = ("quorum", "stream")  # their types refuse a prefetch limit for the whole channel


class TaskQueues:
    """Every task queue by its name, and every exchange that messages are sent to.

    RabbitMQ compares each declaration with the existing queue and refuses one that differs (406), so the
    first process that starts decides for all. A queue that the project declares is therefore created exactly
    so, with its exchanges and bindings; any other queue has Celery's defaults.

    Clients of a project with quorum queues send a delayed message not to its queue but to a ladder of
    exchanges and queues (wire-protocol 3.4): level n holds a message for 2^n seconds if that bit of the delay
    is set, and passes it to the next lower level. A consumer declares the ladder, and binds the exchanges of
    its queues to the ladder's end. Direct exchanges are not delayed that way.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self._declared = {declared.name: declared for declared in settings.declared}
        self.some_are_reserved = False  # of the names that were looked up
        self._queues = {
            declared.name: self._reserved(declared.name) or _queue(declared) for declared in settings.declared
        }
        self._plain: dict[str, Queue] = {}
        bindings = [binding for declared in settings.declared for binding in declared.bindings]
        self._exchanges = {binding.exchange.name: _exchange(binding.exchange) for binding in bindings}
        self._ladder_of = settings.delayed_delivery

    def queue(self, name: str) -> Queue:
        """Return the queue of this name. It is looked up for every message, so undeclared queues are cached
        too.
        """
        found = self._queues.get(name) or self._plain.get(name)
        if found is None:
            if len(self._plain) >= KNOWN_MAX:
                self._plain.clear()
            found = self._plain[name] = self._reserved(name) or task_queue(name)
        return found

    def exchange(self, name: str) -> Exchange:
        """Return the exchange as the project declares it; an undeclared one is expected to exist."""
        return self._exchanges.get(name) or Exchange(name, "")

    def is_declared(self, name: str) -> bool:
        """Whether the project declares the queue, so that it must be created exactly so."""
        return name in self._queues

    def limits_each_consumer(self, name: str) -> bool:
        """Whether the queue's type refuses a prefetch limit for a whole channel."""
        found = self._declared.get(name)
        return found is not None and found.arguments.get("x-queue-type") in _LIMITED_BY_CONSUMER

    def expires_all(self, name: str) -> bool:
        """Whether the queue drops every message that has waited for its TTL."""
        found = self._declared.get(name)
        return found is not None and "x-message-ttl" in found.arguments

    @property
    def needs_ladder(self) -> bool:
        """Whether Celery's clients of this project send delayed messages to the ladder."""
        return any(queue.is_quorum for queue in self._declared.values())

    def ladder(self) -> list[Call]:
        """Return the calls that declare Celery's ladder of delays, of the queue type that the project
        sets.
        """
        return ladder(self._ladder_of)

    def ladder_bindings(self, name: str) -> list[Call]:
        """Return the calls that let the queue's delayed messages arrive from the end of the ladder."""
        queue = self._declared.get(name)
        if queue is None or queue.auto_delete:
            return []
        calls: list[Call] = []
        for binding in queue.bindings:
            exchange = binding.exchange.name
            if exchange and binding.exchange.kind != "direct":
                key = (
                    binding.routing_key if binding.routing_key.startswith("#") else f"#.{binding.routing_key}"
                )
                calls.append((Method.EXCHANGE_BIND, (0, exchange, DELAY_DELIVERY.name, key, False, {})))
                calls.append((Method.QUEUE_BIND, (0, name, exchange, key, False, {})))
        return calls

    def _reserved(self, name: str) -> Queue | None:
        """Return a queue that no task is sent to, if its name is reserved."""
        why = why_reserved(CAPABILITIES.reserved, name)
        self.some_are_reserved |= bool(why)
        return Queue(name, reserved=why) if why else None


def ladder(queue_type: str) -> list[Call]:
    """The calls that declare the ladder, its longest level first; `queue_type`: quorum or classic."""
    declared: list[Call] = DELAY_DELIVERY.calls()
    bound: list[Call] = []
    for level in reversed(range(len(DELAY_LADDER))):
        name, skipped = DELAY_LADDER[level], "*." * (len(DELAY_LADDER) - 1 - level)
        next_name = DELAY_LADDER[level - 1] if level else DELAY_DELIVERY.name
        arguments = {
            "x-queue-type": queue_type,
            "x-overflow": "reject-publish",
            "x-message-ttl": 2**level * 1000,
            "x-dead-letter-exchange": next_name,
        }
        if queue_type == "quorum":
            arguments["x-dead-letter-strategy"] = "at-least-once"
        exchange = Exchange(name, "topic")
        held = Queue(name, arguments=arguments, exchange=exchange, keys=(f"{skipped}1.#",))
        declared += held.calls()
        bound.append((Method.EXCHANGE_BIND, (0, next_name, name, f"{skipped}0.#", False, {})))
    return declared + bound


def mismatch(queue: str, text: str) -> str:
    """Return why a queue cannot be declared as the project has it, and what to do."""
    return (
        f"it exists with other properties than the project declares: {text}; "
        "declare it with the properties that it has, or delete it when it is empty "
        f"(rabbitmqctl delete_queue {queue})"
    )


def _queue(declared: DeclaredQueue) -> Queue:
    return Queue(
        declared.name,
        durable=declared.durable,
        exclusive=declared.exclusive,
        auto_delete=declared.auto_delete,
        arguments=declared.arguments,
        bindings=tuple(
            Binding(_exchange(binding.exchange), binding.routing_key, binding.arguments)
            for binding in declared.bindings
        ),
        is_task=True,
        no_declare=declared.no_declare,
    )


def _exchange(declared: DeclaredExchange) -> Exchange:
    kind = "" if declared.no_declare else declared.kind
    return Exchange(declared.name, kind, declared.durable, declared.auto_delete, declared.arguments)
