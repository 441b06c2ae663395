"""Broker: what the rest of Umbel needs from the place where messages wait, and what that must promise.

A broker has two faces. `Broker` is asynchronous and belongs to one worker process: it claims,
settles, listens. `Producer` is synchronous, safe to share between threads and to use after a
fork: it is what clients and running tasks publish with. `AsyncProducer` is the same for clients on an
event loop.

`Broker` is made of eight narrower Protocols. A module that needs only one of them names that one.

The promises, each of which `tests/brokers/contract.py` checks for every broker:

* `publish` returns when the messages are durable, all of a batch or none.
* A claimed message belongs to its claimer until it is settled or the claimer's lease ends. A
  claimer that reaches the broker once per lease keeps its messages, however long they take.
* `settle` applies a verdict only while the claim still stands; otherwise nothing of it is
  applied and its tag is in `Settled.conflicts`, or in `Settled.unknown` if the data was replaced.
* A follow-up or result of a verdict that the broker refuses (a full queue, a name it does not
  allow, a key of another type) ends alone: everything else of the batch is applied, the follow-up is
  among the dead letters with the reason, in the same step, and `Settled.refused` names it.
* `publish` of something the broker refuses raises `BrokerRefused`, which says what was refused.
* What one verdict brings (result, follow-up messages, the end of the message) is applied
  together where `Capabilities.atomic_settle` says so; elsewhere in that order, so that a crash
  in between repeats work and never loses it.
* A failed task's message that is to be retained (`Ack.keep`) is stored together with the rest of its verdict.
* Starts are counted, not claims: `starts` grows by `Started` and by `Return(charged=True)`.
* A message that is not due is not claimed, nor one whose queue is paused.

Where a broker cannot do something it raises `NotSupported` and says why in `Capabilities`.
Wall-clock instants are Unix seconds, durations are seconds.
"""

from typing import Protocol

from umbel.brokers.interface.cluster import (
    Broadcast,
    ClusterRecord,
    EventLog,
    EventLogState,
    Evidence,
    FanOut,
    LoggedEvent,
    Subscription,
    judge_mark,
)
from umbel.brokers.interface.connection import (
    DEFAULT_LEASE_S,
    BrokerConnection,
    BrokerInfo,
    BrokerSettings,
    Capabilities,
    DeclaredBinding,
    DeclaredExchange,
    DeclaredQueue,
    Replaced,
)
from umbel.brokers.interface.messages import (
    BATCH_MAX,
    SENT_REMEMBERED_S,
    Ack,
    AsyncProducer,
    Attempt,
    Bury,
    Claim,
    Delivery,
    Messages,
    Permit,
    Producer,
    Refused,
    Return,
    SetAside,
    Settled,
    Spend,
    Started,
    Tag,
    Verdict,
)
from umbel.brokers.interface.queues import (
    DEAD_LETTER_PEEK_MAX,
    MOVED_AT_ONCE_MAX,
    PAUSED_MAX,
    RESEND_CHUNK,
    DeadLetter,
    Depth,
    Failures,
    Pause,
    QueueControl,
    Queues,
    Resend,
    Resent,
    ready_for,
)

__all__ = [
    "Ack",
    "AsyncProducer",
    "Attempt",
    "BATCH_MAX",
    "Broadcast",
    "Broker",
    "BrokerConnection",
    "BrokerInfo",
    "BrokerSettings",
    "Bury",
    "Capabilities",
    "Claim",
    "ClusterRecord",
    "DEAD_LETTER_PEEK_MAX",
    "DEFAULT_LEASE_S",
    "DeadLetter",
    "DeclaredBinding",
    "DeclaredExchange",
    "DeclaredQueue",
    "Delivery",
    "Depth",
    "EventLog",
    "EventLogState",
    "Evidence",
    "Failures",
    "FanOut",
    "LoggedEvent",
    "MOVED_AT_ONCE_MAX",
    "Messages",
    "PAUSED_MAX",
    "Pause",
    "Permit",
    "Producer",
    "QueueControl",
    "Queues",
    "RESEND_CHUNK",
    "Refused",
    "Replaced",
    "Resend",
    "Resent",
    "Return",
    "SENT_REMEMBERED_S",
    "SetAside",
    "Settled",
    "Spend",
    "Started",
    "Subscription",
    "Tag",
    "Verdict",
    "judge_mark",
    "ready_for",
]


class Broker(
    BrokerConnection, Messages, Queues, QueueControl, Failures, FanOut, EventLog, ClusterRecord, Protocol
):
    """The asynchronous face, for one worker process or one command of the CLI."""
