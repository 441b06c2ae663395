"""Every exception of Umbel. Each says what happened, to which value, and what to do about it.

UmbelError
├── ConfigurationError         a setting, option or URL that cannot be used
│   ├── UnknownSetting         with the nearest known name
│   ├── BadSetting             known, but of the wrong type or out of range
│   ├── BadURL                 a broker or backend address that cannot be understood
│   ├── AppNotFound            -A names nothing that can be loaded
│   │   └── NoApp              no app was named, and none is in the current directory
│   ├── BadBootsteps           a cycle or an unknown requirement between worker steps
│   └── DuplicateNode          a worker of that name is already running
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

from umbel.urls import without_password


class UmbelError(Exception):
    """The root of all errors raised by Umbel."""


class ConfigurationError(UmbelError):
    """A setting, option or URL that cannot be used."""


class UnknownSetting(ConfigurationError):
    def __init__(self, name: str, known: Iterable[str], *, source: str) -> None:
        near = nearest(name, known, cutoff=0.5)
        hint = f"; did you mean {near!r}?" if near else ""
        super().__init__(f"unknown setting {name!r} in {source}{hint}")


class BadSetting(ConfigurationError):
    def __init__(self, name: str, value: object, problem: str, *, source: str) -> None:
        super().__init__(f"setting {name!r} in {source} is {value!r}: {problem}")


class BadURL(ConfigurationError):
    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"cannot use the address {without_password(url)!r}: {problem}")


class AppNotFound(ConfigurationError):
    pass


class NoApp(AppNotFound):
    """No app was named, and none is in the current directory."""


class BadBootsteps(ConfigurationError):
    pass


class DuplicateNode(ConfigurationError):
    pass


class WireError(UmbelError):
    """Bytes that are not what the protocol says."""


class BadMessage(WireError):
    pass


class BadFrame(WireError):
    pass


class BadValue(WireError):
    pass


class TooLarge(WireError):
    pass


class BrokerError(UmbelError):
    """The broker did not do what was requested."""


class BrokerUnavailable(BrokerError):
    pass


class BrokerSilent(BrokerUnavailable):
    pass


class AccessRefused(BrokerUnavailable):
    pass


class BufferFull(BrokerUnavailable):
    pass


class SendUnknown(BrokerUnavailable):
    """The broker did not say whether it has these messages. On Redis and the embedded broker they can be sent
    again with the same ids, and each runs once; on RabbitMQ one that had arrived runs twice."""

    def __init__(self, task_ids: Sequence[str], why: str) -> None:
        self.task_ids, self.why = tuple(task_ids), why
        more = f" (and {len(self.task_ids) - 1} more)" if len(self.task_ids) > 1 else ""
        super().__init__(
            f"task {self.task_ids[0]}{more} may or may not have been sent: {why}. "
            "Send again with the same task_id: on Redis and the embedded broker it runs once, whether or not "
            "the first one arrived; on RabbitMQ it may run twice"
        )


class StorageFull(BrokerError):
    pass


class BrokerRefused(BrokerError):
    """The broker or the result backend refuses one message or result; it accepts others.

    `places`: which of the given items were refused; the others were applied. Without places
    nothing was applied.
    """

    def __init__(self, message: str, *, places: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)


class NotSupported(BrokerError):
    pass


class RevokesFull(BrokerError):
    pass


class TaskError(UmbelError):
    """Something about one task."""


class NotRegistered(TaskError):
    @classmethod
    def named(cls, name: str) -> Self:
        return cls(
            f"no task named {name!r} is registered here; import its module in the app, or check the name"
        )


class WrongType(TaskError, TypeError):
    """An argument or a result that does not fit the type that its task states."""


class WorkerLost(TaskError):
    pass


class TimeLimitExceeded(TaskError):
    """`limit_s`: the hard limit that ended the task, where it is known."""

    def __init__(self, *args: Any, limit_s: float | None = None) -> None:
        super().__init__(*args)
        self.limit_s = limit_s


class SoftTimeLimitExceeded(TaskError):
    pass


class WorkerStopping(SoftTimeLimitExceeded):
    """The worker got a second stop signal. Clean up and let it propagate: the message is requeued."""


class TaskCancelled(TaskError):
    pass


class TaskRevoked(TaskError):
    pass


class TaskRejected(TaskError):
    pass


class MaxRetriesExceeded(TaskError):
    pass


class ChordError(TaskError):
    pass


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
    @classmethod
    def answered(cls, topic: str, answers: Iterable[str]) -> Self:
        said = "; ".join(sorted(set(answers))[:3])
        return cls(
            f"no worker handles elections of topic {topic!r}: {said}; define an election_handler for it"
        )


class ElectionTimeout(ElectionError, TimeoutError):
    @classmethod
    def after(cls, election_id: str, state: str, timeout_s: float) -> Self:
        return cls(
            f"election {election_id!r} is still {state} after {timeout_s:g} s; "
            "it continues; ask again with the same id, or run `umbel election show`"
        )


class LeaseTimeout(UmbelError, TimeoutError):
    @classmethod
    def after(cls, name: str, leader: str, timeout_s: float) -> Self:
        return cls(f"lease {name!r} was not free within {timeout_s:g} s; its holder is {leader or 'unknown'}")


class OutboxError(UmbelError):
    """A task cannot be sent in this transaction, or an outbox cannot be used."""


class OutboxUnavailable(OutboxError):
    """The database of an outbox, or its table, cannot be reached."""


class HistoryError(UmbelError):
    pass


class NothingBuilt(HistoryError):
    def __init__(self, lake: object) -> None:
        super().__init__(
            f"no tables in the lake {str(lake)!r}; build them with `umbel history build`, or name"
            " another lake with --lake"
        )


class LakeError(HistoryError):
    pass


class LakeBusy(LakeError):
    pass


class BadQuery(HistoryError):
    pass


class SlowQuery(BadQuery):
    pass


class ResultTimeout(UmbelError, TimeoutError):
    pass


class NotKept(UmbelError):
    @classmethod
    def of(cls, task_id: str) -> Self:
        return cls(
            f"no message of the task {task_id} is kept: it did not fail, was retried already, made room for"
            " newer failures, or is not to be kept (`failed_keep`, `keep_failed`); `umbel task failed` lists"
            " those that are"
        )


class JoinWouldBlock(UmbelError, RuntimeError):
    pass


class WorkerStalled(UmbelError):
    pass


class PoolError(UmbelError):
    pass


class TaskControl(UmbelError):
    """Raised by tasks to say how they end."""


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
    """Give the message back to its queue, or (the default) to the dead letters."""

    def __init__(self, reason: str = "", *, requeue: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.requeue = requeue


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The known name that was probably meant; "" if none is near."""
    from difflib import get_close_matches  # a fifth of a megabyte that only errors need

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
