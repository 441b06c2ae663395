"""Broker: what the rest of Umbel needs from the place where messages wait, and what a broker must promise.

A broker has two faces. `Broker` is asynchronous and belongs to one worker process: it claims, settles,
listens. `Producer` is synchronous, safe to share between threads and to use after a fork: clients and running
tasks publish with it. `AsyncProducer` is the same for clients on an event loop.

`Broker` is made of eight narrower Protocols. A module that needs one of them names that one; a module that
needs several takes `Broker`. No Protocol only combines others.

The promises, each of which `tests/brokers/contract.py` checks for every broker:

* `publish` returns when the messages are durable, all of a batch or none.
* A claimed message belongs to its claimer until it is settled or the claimer's lease ends. A claimer that
  reaches the broker once per lease keeps its messages, however long they take.
* `settle` applies a verdict only while the claim is in force; otherwise nothing of it is applied and its tag
  is in `Settled.conflicts`, or in `Settled.unknown` if the data was replaced.
* If the broker refuses a follow-up or result of a verdict (a full queue, a name it does not allow, a key of
  another type), only this part fails. Everything else of the batch is applied, the follow-up becomes a dead
  letter with the reason in the same step, and `Settled.refused` names it.
* If the broker refuses a published message, `publish` raises `BrokerRefused`, which names it.
* The parts of one verdict (result, follow-up messages, the end of the message) are applied together where
  `Capabilities.atomic_settle` says so; elsewhere in that order, so that a crash in between repeats work and
  never loses it.
* A failed task's message that is to be retained (`Ack.keep`) is stored together with the rest of its verdict.
* Starts are counted, not claims: `starts` grows by `Started` and by `Return(charged=True)`.
* A message that is not due is not claimed, nor one whose queue is paused.

A broker that cannot do something raises `NotSupported` and says why in `Capabilities`. Wall-clock instants
are Unix seconds, durations are seconds.
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


class Broker(
    BrokerConnection, Messages, Queues, QueueControl, Failures, FanOut, EventLog, ClusterRecord, Protocol
):
    """The asynchronous face, for one worker process or one command of the CLI."""
