"""Every exception of Umbel. Each says what happened, to which value, and what to do about it.

UmbelError
├── ConfigurationError         a setting, option or URL that cannot be used
│   ├── UnknownSetting         with the nearest known name
│   ├── BadSetting             known, but of the wrong type or out of range
│   ├── BadURL                 a broker or backend address that cannot be understood
│   ├── AppNotFound            -A names nothing that can be loaded
│   │   └── NoApp              no app was named, and none is in the current directory
│   ├── BadBootsteps           a cycle or an unknown requirement between worker steps
│   ├── DuplicateNode          a worker of that name is already running
│   └── NoClusterId            messages are signed, and the broker has no id to bind signatures to
├── WireError                  bytes that are not what the protocol says
│   ├── BadMessage             a task message that cannot be understood
│   ├── BadFrame               a frame between the worker and a child that cannot be understood
│   ├── BadValue               a value that no serializer can carry
│   └── TooLarge               over a size, depth or number limit
├── BrokerError                the broker did not do what was requested
│   ├── BrokerUnavailable      cannot be reached or opened: wait, then retry
│   │   ├── BrokerSilent       gives no answer at all: check the network
│   │   ├── AccessRefused      wrong user, password, right, database or file: a retry does not help
│   │   ├── BufferFull         too many messages are buffered for an unavailable broker
│   │   ├── MayHaveArrived     what was sent is not confirmed, and may still arrive (RabbitMQ)
│   │   ├── RowsSetAside       malformed rows of the database file were set aside: retry
│   │   ├── ClusterIdLost      the broker lost the id that signatures are bound to, while a worker runs
│   │   └── SendUnknown        the broker was cut off while a task was sent: it may run, or not
│   ├── StorageFull            no room left; nothing was changed
│   ├── BrokerRefused          this message or result is refused for good; others are accepted
│   ├── NotSupported           this broker declares that it cannot do this
│   └── RevokesFull            the durable revoke record reached its limit
├── TaskError                  about one task
│   ├── NotRegistered          no task of that name here
│   ├── WrongType              an argument or result does not fit its annotation (also a TypeError)
│   ├── WorkerLost             the process running the task died
│   ├── TimeLimitExceeded      the hard limit ended the task
│   ├── SoftTimeLimitExceeded  raised inside the task at the soft limit
│   │   └── WorkerStopping     raised inside the task when its worker gets a second stop signal
│   ├── TaskCancelled          raised inside the task when it is revoked while it runs
│   ├── TaskRevoked            the task was revoked before it ran, or ended because of that
│   ├── TaskRejected           the task gave its message to the dead letters (it raised Reject)
│   ├── MaxRetriesExceeded     retry() was called once too often
│   ├── ChordError             a task of a chord failed, so its body cannot run
│   └── RemoteError            the task failed with an exception this process cannot rebuild
├── ElectionError              an election cannot be opened as requested
│   ├── UnknownTopic           no worker has a handler for its topic
│   └── ElectionTimeout        it was not decided in time (also a TimeoutError)
├── LeaseTimeout               the lease was not free in time (also a TimeoutError)
├── OutboxError                a task cannot be sent in this transaction, or an outbox cannot be used
│   └── OutboxUnavailable      its database or table cannot be reached: repair it, then retry
├── HistoryError               what was recorded cannot be read
│   ├── LakeError              a lake (folder of history) cannot be used as requested
│   │   └── LakeBusy           another process is using it
│   ├── NothingBuilt           there is no history to read yet
│   └── BadQuery               SQL that cannot be run
│       └── SlowQuery          it was interrupted at its limit of time
├── ResultTimeout              get() reached its timeout (also a TimeoutError)
├── NotKept                    a task cannot be retried: its message is not kept
├── JoinWouldBlock             a task waits for another task's result
├── WorkerStalled              a worker had messages and free slots and took nothing
├── PoolError                  the pool of child processes cannot do its work
└── TaskControl                raised by tasks to say how they end; never an error
    ├── Retry                  run the task again later
    ├── Ignore                 leave the state as it is
    └── Reject                 give the message back, or to the dead letters
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from umbel.text import without_password


class UmbelError(Exception):
    """The base class of all errors raised by Umbel."""


class ConfigurationError(UmbelError):
    """A setting, option or URL that cannot be used."""


class UnknownSetting(ConfigurationError):
    """A setting of this name does not exist; the text has the nearest known name."""

    def __init__(self, name: str, known: Iterable[str], *, source: str) -> None:
        near = nearest(name, known, cutoff=0.5)
        hint = f"; did you mean {near!r}?" if near else ""
        super().__init__(f"unknown setting {name!r} in {source}{hint}")


class BadSetting(ConfigurationError):
    """A setting has a wrong type or is out of range."""

    def __init__(self, name: str, value: object, problem: str, *, source: str) -> None:
        super().__init__(f"setting {name!r} in {source} is {value!r}: {problem}")


class BadURL(ConfigurationError):
    """A broker or backend address cannot be understood."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"cannot use the address {without_password(url)!r}: {problem}")


class AppNotFound(ConfigurationError):
    """The app that -A names cannot be loaded."""


class NoApp(AppNotFound):
    """No app was named, and none is in the current directory."""


class BadBootsteps(ConfigurationError):
    """Worker steps require each other in a cycle, or an unknown step."""


class DuplicateNode(ConfigurationError):
    """A worker with this node name is already running."""


class NoClusterId(ConfigurationError):
    """Messages are signed, and the broker has no id of the cluster to bind signatures to."""

    @classmethod
    def at(cls, broker: str) -> "NoClusterId":
        """Return the error for this broker, with the commands that repair it."""
        return cls(
            f"'signing_keys' are set, but {broker} has no cluster id, which signatures are bound to: "
            "for a new cluster, or after the upgrade from 0.3, run `umbel cluster-id make`; if it had one, "
            "run `umbel cluster-id restore ID`; or set 'signing_cluster'"
        )


class WireError(UmbelError):
    """Received bytes do not follow the protocol."""


class BadMessage(WireError):
    """A task message cannot be understood."""


class BadFrame(WireError):
    """A frame between the worker and a child process cannot be understood."""


class BadValue(WireError):
    """No serializer can encode a value."""


class TooLarge(WireError):
    """A size, depth or number exceeds its limit."""


class BrokerError(UmbelError):
    """The broker did not do what was requested."""


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached or opened: wait, then retry."""


class MayHaveArrived(BrokerUnavailable):
    """The message was sent, but the broker has not confirmed it."""


class BrokerSilent(BrokerUnavailable):
    """The broker does not answer at all: check the network."""


class AccessRefused(BrokerUnavailable):
    """The broker refuses the user, password, database or file: a retry does not help."""


class RowsSetAside(BrokerUnavailable):
    """The database file had malformed rows, which have been set aside. Nothing else was changed."""


class BufferFull(BrokerUnavailable):
    """Too many messages are buffered for an unavailable broker."""


class ClusterIdLost(BrokerUnavailable):
    """The broker lost the id that signatures are bound to, while a worker runs."""

    @classmethod
    def of(cls, expected: str, found: str) -> "ClusterIdLost":
        """Return the error for the expected id and the one that the broker has now."""
        now = f"names this cluster {found!r} now" if found else "lost the id of this cluster"
        return cls(
            f"the broker {now}, and with it maybe which signatures were used; no signed message runs until "
            f"`umbel cluster-id restore {expected}` has run, or the workers start with another id"
        )


class SendUnknown(BrokerUnavailable):
    """The broker did not say whether it received these messages.

    On Redis and the embedded broker they can be sent again with the same ids, and each runs once. On RabbitMQ
    a message that had arrived may run twice.
    """

    def __init__(self, task_ids: Sequence[str], why: str) -> None:
        self.task_ids, self.why = tuple(task_ids), why
        more = f" (and {len(self.task_ids) - 1} more)" if len(self.task_ids) > 1 else ""
        super().__init__(
            f"task {self.task_ids[0]}{more} may or may not have been sent: {why}. "
            "Send again with the same task_id: on Redis and the embedded broker it runs once, whether or not "
            "the first one arrived; on RabbitMQ it may run twice"
        )


class StorageFull(BrokerError):
    """The broker has no room; nothing was changed."""


class BrokerRefused(BrokerError):
    """The broker or the result backend refuses one message or result; it accepts others.

    `places` lists the indices of the refused items; the others were applied. If it is empty, nothing was
    applied.
    """

    def __init__(self, message: str, *, places: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)


class NotSupported(BrokerError):
    """This broker declares that it cannot do this."""


class RevokesFull(BrokerError):
    """The durable record of revokes reached its limit."""


class TaskError(UmbelError):
    """The base class of errors about one task."""


class NotRegistered(TaskError):
    """No task of this name is registered here."""

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the error for a task name."""
        return cls(
            f"no task named {name!r} is registered here; import its module in the app, or check the name"
        )


class WrongType(TaskError, TypeError):
    """An argument or a result does not match the type that its task declares."""


class WorkerLost(TaskError):
    """The process that ran the task died."""


class TimeLimitExceeded(TaskError):
    """The task was ended at its hard time limit. `limit_s` is that limit, if it is known."""

    def __init__(self, *args: Any, limit_s: float | None = None) -> None:
        super().__init__(*args)
        self.limit_s = limit_s


class SoftTimeLimitExceeded(TaskError):
    """Raised inside a task at its soft time limit."""


class WorkerStopping(SoftTimeLimitExceeded):
    """The worker got a second stop signal. Clean up and let it propagate: the message is requeued."""


class TaskCancelled(TaskError):
    """Raised inside a task that is revoked while it runs."""


class TaskRevoked(TaskError):
    """The task was revoked before it ran, or ended because of that."""


class TaskRejected(TaskError):
    """The task raised Reject, which made its message a dead letter."""


class MaxRetriesExceeded(TaskError):
    """`retry()` was called more often than the task allows."""


class ChordError(TaskError):
    """A task of a chord failed, so its body cannot run."""


class RemoteError(TaskError):
    """The task failed with an exception whose class cannot be rebuilt in this process."""

    def __init__(self, type_name: str, *args: Any) -> None:
        self.type_name = type_name
        self.remote_args = args
        super().__init__(type_name, *args)

    def __str__(self) -> str:
        return f"{self.type_name}({', '.join(map(repr, self.remote_args))})"


class ElectionError(UmbelError):
    """An election cannot be opened as requested."""


class UnknownTopic(ElectionError):
    """No worker has a handler for the topic of an election."""

    @classmethod
    def answered(cls, topic: str, answers: Iterable[str]) -> Self:
        """Return the error with the replies of the workers."""
        listed = "; ".join(sorted(set(answers))[:3])
        return cls(
            f"no worker handles elections of topic {topic!r}: {listed}; define an election_handler for it"
        )


class ElectionTimeout(ElectionError, TimeoutError):
    """The election was not decided in time."""

    @classmethod
    def after(cls, election_id: str, state: str, timeout_s: float) -> Self:
        """Return the error with the election's state after the timeout."""
        return cls(
            f"election {election_id!r} is still {state} after {timeout_s:g} s; "
            "it continues; ask again with the same id, or run `umbel election show`"
        )


class LeaseTimeout(UmbelError, TimeoutError):
    """The lease was not free in time."""

    @classmethod
    def after(cls, name: str, leader: str, timeout_s: float) -> Self:
        """Return the error with the current holder of the lease."""
        return cls(f"lease {name!r} was not free within {timeout_s:g} s; its holder is {leader or 'unknown'}")


class OutboxError(UmbelError):
    """A task cannot be sent in this transaction, or an outbox cannot be used."""


class OutboxUnavailable(OutboxError):
    """The database of an outbox, or its table, cannot be reached."""


class HistoryError(UmbelError):
    """Recorded history cannot be read."""


class NothingBuilt(HistoryError):
    """The lake has no tables yet."""

    def __init__(self, lake: object) -> None:
        super().__init__(
            f"no tables in the lake {str(lake)!r}; build them with `umbel history build`, or name"
            " another lake with --lake"
        )


class LakeError(HistoryError):
    """A lake cannot be used as requested."""


class LakeBusy(LakeError):
    """Another process is using the lake."""


class BadQuery(HistoryError):
    """The SQL cannot be run."""


class SlowQuery(BadQuery):
    """A query was interrupted at its time limit."""


class ResultTimeout(UmbelError, TimeoutError):
    """No result arrived within the timeout of `get()`."""


class NotKept(UmbelError):
    """A failed task cannot be retried: its message is not stored."""

    @classmethod
    def of(cls, task_id: str) -> Self:
        """Return the error for this task, with the possible reasons."""
        return cls(
            f"no message of the task {task_id} is stored: it did not fail, was retried already, made room for"
            " newer failures, or is not to be stored (`failed_keep`, `keep_failed`); `umbel task failed`"
            " lists the stored messages"
        )


class JoinWouldBlock(UmbelError, RuntimeError):
    """A task waits for another task's result, which can block all workers."""


class WorkerStalled(UmbelError):
    """A worker had messages and free slots, and took nothing."""


class PoolError(UmbelError):
    """The pool of child processes cannot do its work."""


class TaskControl(UmbelError):
    """The base class of exceptions that tasks raise to say how they end."""


class Retry(TaskControl):
    """Run the task again later; raised by `self.retry()`."""

    def __init__(
        self,
        message: str = "",
        *,
        exc: BaseException | None = None,
        when: float | None = None,
        again: Any = None,
    ) -> None:
        super().__init__(message)
        self.exc = exc
        self.when = when
        self.again = again  # the message to send, if it differs from the original


class Ignore(TaskControl):
    """End the task and leave its state as it is."""

    def __init__(self, *args: Any, follow_ups: Sequence[Any] = ()) -> None:
        super().__init__(*args)
        self.follow_ups = follow_ups  # messages to send when the task is settled


class Reject(TaskControl):
    """Give the message back to its queue, or (the default) make it a dead letter."""

    def __init__(self, reason: str = "", *, requeue: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.requeue = requeue


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name that was probably meant; "" if no known name is similar."""
    from difflib import get_close_matches  # takes 200 kB of memory that only errors need

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
