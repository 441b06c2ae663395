"""Broker: what the rest of Umbel asks of the place where messages wait, and what it must promise.

A broker has two faces. `Broker` is asynchronous and belongs to one worker process: it claims,
settles, listens. `Producer` is synchronous, safe to share between threads and to use after a
fork: it is what clients and running tasks publish with. `AsyncProducer` is the same for clients on an
event loop.

`Broker` is made of seven narrower Protocols, a file each. Who needs one of them names that one.

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
* Starts are counted, not claims: `starts` grows by `Started` and by `Return(charged=True)`.
* A message that is not due is not claimed, nor one whose queue is paused.

Where a broker cannot do something it raises `NotSupported` and says why in `Capabilities`.
Wall-clock instants are Unix seconds, durations are seconds.
"""

from typing import Protocol

from umbel.brokers.interface.cluster import ClusterRecord
from umbel.brokers.interface.connection import BrokerConnection, BrokerInfo, Replaced
from umbel.brokers.interface.declared import DeclaredBinding, DeclaredExchange, DeclaredQueue
from umbel.brokers.interface.event_log import EventLog, EventLogState, LoggedEvent
from umbel.brokers.interface.fan_out import Broadcast, FanOut, Subscription
from umbel.brokers.interface.messages import (
    Ack,
    Bury,
    Claim,
    Delivery,
    Messages,
    Permit,
    Refused,
    Return,
    Settled,
    Spend,
    Started,
    Tag,
    Verdict,
)
from umbel.brokers.interface.producer import (
    BATCH_MAX,
    SENT_REMEMBERED_S,
    AsyncProducer,
    Attempt,
    Producer,
)
from umbel.brokers.interface.queue_control import MOVED_AT_ONCE_MAX, PAUSED_MAX, Pause, QueueControl
from umbel.brokers.interface.queues import DEAD_LETTER_PEEK_MAX, DeadLetter, Depth, Queues, ready_for
from umbel.brokers.interface.settings import DEFAULT_LEASE_S, BrokerSettings
from umbel.brokers.transport import Capabilities

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
    "Refused",
    "Replaced",
    "Return",
    "SENT_REMEMBERED_S",
    "Settled",
    "Spend",
    "Started",
    "Subscription",
    "Tag",
    "Verdict",
    "ready_for",
]


class Broker(BrokerConnection, Messages, Queues, QueueControl, FanOut, EventLog, ClusterRecord, Protocol):
    """The asynchronous face, for one worker process (or one command of the CLI)."""
