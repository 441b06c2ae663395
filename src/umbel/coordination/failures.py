"""Failures: which failed tasks can be retried, and the retry itself; for results, commands and the dashboard.

Messages of failed tasks are kept by the broker, those of rejected and lost ones are its dead letters. A retry
takes a message from either place and sends it as a new task (`wire/retried.py`). The new id is made from that
of the letter, so a retry that is repeated, because nobody knows whether it was sent, is the same task.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol
from uuid import UUID, uuid5

from umbel.brokers.interface import DeadLetter, Failures, Queues, Resend
from umbel.clock import cluster_now
from umbel.errors import BadMessage, BrokerRefused, NotKept, WireError
from umbel.protocol.delivery.sensitive import MASK, Hides, hides_nothing, is_open
from umbel.protocol.delivery.trust import is_replayed
from umbel.wire.compat.legacy import to_v2
from umbel.wire.message import Outgoing
from umbel.wire.retried import retried, retry_of
from umbel.wire.signing import Keyring
from umbel.wire.task import read_headers

LOOK_MAX = 100_000
ONE_BY_ONE_MAX = 20  # ids that are looked for each by itself; more: all letters are read
ANY_CONTENT = ("json", "msgpack")  # what can be read without running code of the sender's
_NAMESPACE = UUID("8a1f5a55-6b1f-5a0e-9b53-2d6a1d0f6f2e")


def hides_everything(_name: str | None) -> bool:
    """Where no app says which arguments are sensitive."""
    return True


class FailureBroker(Failures, Queues, Protocol):
    """Both places where messages of failed tasks are."""


@dataclass(frozen=True, slots=True)
class FailedTask:
    """What is known of a failed task whose message is there; arguments as the sender showed them."""

    letter: DeadLetter
    task_id: str
    task: str
    root_id: str
    retry_of: str
    args: str
    kwargs: str
    sender: str

    @property
    def kind(self) -> str:
        return "failed" if self.letter.failed else "dead letter"

    def text(self, name: str) -> str:
        """A field that people filter by."""
        match name:
            case "queue" | "reason":
                return str(getattr(self.letter, name))
            case _:
                return str(getattr(self, name))


FIELDS = ("task_id", "task", "queue", "reason", "root_id", "retry_of", "args", "kwargs", "sender", "kind")


@dataclass(frozen=True, slots=True)
class Condition:
    """`FIELD=GLOB`, or `FIELD~TEXT` for a field that contains the text."""

    name: str
    sign: str
    value: str

    def holds(self, task: FailedTask) -> bool:
        found = task.text(self.name)
        return self.value in found if self.sign == "~" else fnmatchcase(found, self.value)


def parse_condition(text: str) -> Condition:
    """ValueError: it is none."""
    signs = [(text.index(sign), sign) for sign in "=~" if sign in text]
    if not signs:
        raise ValueError(f"{text!r} is not a valid filter; write FIELD=VALUE, or FIELD~PART")
    at, sign = min(signs)
    name = text[:at].strip()
    if name not in FIELDS:
        raise ValueError(f"unknown field {name!r}; choose {', '.join(FIELDS)} for the filter")
    return Condition(name, sign, text[at + 1 :])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which failed tasks; all of this must hold. `name` is a glob, times are Unix seconds."""

    ids: Collection[str] = ()
    name: str = ""
    since: float = 0.0
    until: float = float("inf")
    where: Sequence[Condition] = ()

    def holds(self, task: FailedTask) -> bool:
        return (
            (not self.ids or task.task_id in self.ids)
            and (not self.name or fnmatchcase(task.task, self.name))
            and self.since <= task.letter.buried_at < self.until
            and all(one.holds(task) for one in self.where)
        )


@dataclass(frozen=True, slots=True)
class Retried:
    """By the id of the failed task: the id of its retry, or why it was refused.

    `gone`: its message was not there any more, because somebody else retried it, or it made room.
    """

    sent: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


async def find_failed(
    broker: FailureBroker, wanted: Wanted, hides: Hides = hides_nothing
) -> list[FailedTask]:
    """Those that match, newest first. `hides`: of which tasks arguments that nobody masked are not shown."""
    letters: list[DeadLetter] = []
    if 0 < len(wanted.ids) <= ONE_BY_ONE_MAX:
        for task_id in wanted.ids:
            letters += await broker.failed(LOOK_MAX, task_id=task_id)
    else:
        letters += await broker.failed(LOOK_MAX)
    letters += await broker.dead_letters(LOOK_MAX)
    tasks = (failed_task(letter, hides) for letter in letters)
    found = [task for task in tasks if task is not None and wanted.holds(task)]
    return sorted(found, key=lambda one: one.letter.buried_at, reverse=True)


def failed_task(letter: DeadLetter, hides: Hides = hides_nothing) -> FailedTask | None:
    """None: it is no message of a task."""
    try:
        headers = read_headers(to_v2(letter.message))
    except WireError:
        return None
    is_hidden = is_open(headers.argsrepr, headers.kwargsrepr) and hides(headers.task)
    return FailedTask(
        letter=letter,
        task_id=headers.id,
        task=headers.task,
        root_id=headers.root_id or headers.id,
        retry_of=retry_of(letter.message.headers) or "",
        args=MASK if is_hidden else headers.argsrepr,
        kwargs=MASK if is_hidden else headers.kwargsrepr,
        sender=headers.origin,
    )


async def retry_failed(
    broker: FailureBroker,
    chosen: Iterable[FailedTask],
    *,
    accept: Collection[str] = ANY_CONTENT,
    reply_to: str | None = None,
) -> Retried:
    """Retry each task once, whatever number of its messages there are."""
    done = Retried()
    newest: list[tuple[FailedTask, Outgoing]] = []
    older: list[Resend] = []
    seen: set[str] = set()
    for one in sorted(chosen, key=lambda one: one.letter.buried_at, reverse=True):
        if one.task_id in seen:
            older.append(Resend(one.letter, None))
            continue
        try:
            newest.append((one, again(one, broker.keyring, accept=accept, reply_to=reply_to)))
        except WireError as error:
            done.refused[one.task_id] = str(error)
            continue
        seen.add(one.task_id)
    # The oldest failures run first. Surplus messages go before them: one that stayed would be retried later.
    newest.reverse()
    resent = await broker.resend([*older, *(Resend(one.letter, sent) for one, sent in newest)])
    for place, (one, sent) in enumerate(newest, len(older)):
        if place in resent.sent:
            done.sent[one.task_id] = sent.message.correlation_id
        elif place in resent.refused:
            done.refused[one.task_id] = resent.refused[place]
        else:
            done.gone.append(one.task_id)
    return done


async def retry_one(
    broker: FailureBroker, task_id: str, *, accept: Collection[str], reply_to: str | None = None
) -> str:
    """The id of the new task. NotKept: there is no message of the task. BrokerRefused: it was not sent."""
    found = await find_failed(broker, Wanted(ids=(task_id,)))
    done = await retry_failed(broker, found, accept=accept, reply_to=reply_to)
    if task_id in done.sent:
        return done.sent[task_id]
    if task_id in done.refused:
        raise BrokerRefused(f"the task {task_id} cannot be retried: {done.refused[task_id]}")
    raise NotKept.of(task_id)


def again(
    failed: FailedTask, keyring: Keyring | None, *, accept: Collection[str], reply_to: str | None = None
) -> Outgoing:
    """The message of the retry, signed if the old one was genuine. WireError: there can be none."""
    letter = failed.letter
    if keyring is not None and is_replayed(letter.reason):
        raise BadMessage("a copy of a signed message cannot be retried; retry the original")

    def derive(old: str) -> str:
        return str(uuid5(_NAMESPACE, f"{failed.kind}\n{letter.letter_id}\n{failed.task_id}\n{old}"))

    queue = letter.queue or letter.message.routing_key
    new = Outgoing(queue, retried(letter.message, derive, accept=accept, reply_to=reply_to))
    if keyring is None:
        return new
    return keyring.resigned(Outgoing(letter.queue, letter.message), new, cluster_now())
