"""Failures: which failed tasks can be retried, and the retry itself; for results, commands and the dashboard.

The broker stores messages of failed tasks; those of rejected and lost ones are its dead letters. A retry
takes a message from either place and sends it as a new task (`wire/retried.py`). The new id is derived from
that of the letter, so a retry that is repeated after a lost reply is the same task.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID, uuid5

from umbel.brokers.interface import Broker, DeadLetter, Resend
from umbel.clock import cluster_now
from umbel.errors import BadMessage, BrokerRefused, NotKept, WireError
from umbel.patterns import fits_glob
from umbel.protocol.delivery.sensitive import MASK, Hides, hides_nothing, is_open
from umbel.protocol.delivery.trust import Doubted
from umbel.wire.call import read_headers
from umbel.wire.message import JSON_CONTENT, Outgoing
from umbel.wire.retried import retried, retry_of
from umbel.wire.signing import Signer, marked_unsigned
from umbel.wire.task import to_v2

LOOK_MAX = 100_000
ONE_BY_ONE_MAX = 20  # up to so many ids are looked up singly; for more, all letters are read
ANY_CONTENT = ("json", "msgpack")  # readable without running code of the sender
_NAMESPACE = UUID("8a1f5a55-6b1f-5a0e-9b53-2d6a1d0f6f2e")


def hides_everything(_name: str | None) -> bool:
    """Return True: without an app it is unknown which arguments are sensitive, so all are hidden."""
    return True


@dataclass(frozen=True, slots=True)
class FailedTask:
    """A failed task whose message is stored; arguments as the sender showed them."""

    letter: DeadLetter
    task_id: str
    task: str
    root_id: str
    retry_of: str
    attempt: int
    args: str
    kwargs: str
    sender: str

    @property
    def kind(self) -> str:
        """Where its message is: `failed` or `dead letter`."""
        return "failed" if self.letter.failed else "dead letter"

    def text(self, name: str) -> str:
        """Return a field as text, for filters."""
        return str(getattr(self.letter if name in ("queue", "reason") else self, name))


FIELDS = ("task_id", "task", "queue", "reason", "root_id", "retry_of", "args", "kwargs", "sender", "kind")


@dataclass(frozen=True, slots=True)
class FilterCondition:
    """`FIELD=GLOB`, or `FIELD~TEXT` for a field that contains the text."""

    name: str
    sign: str
    value: str

    def holds(self, task: FailedTask) -> bool:
        """Return whether the task fulfils the condition."""
        found = task.text(self.name)
        return self.value in found if self.sign == "~" else fits_glob(found, self.value)


def parse_condition(text: str) -> FilterCondition:
    """Return the condition that a user wrote; raises ValueError for an invalid one."""
    signs = [(text.index(sign), sign) for sign in "=~" if sign in text]
    if not signs:
        raise ValueError(f"{text!r} is not a valid filter; write FIELD=VALUE, or FIELD~PART")
    at, sign = min(signs)
    name = text[:at].strip()
    if name not in FIELDS:
        raise ValueError(f"unknown field {name!r}; choose {', '.join(FIELDS)} for the filter")
    return FilterCondition(name, sign, text[at + 1 :])


@dataclass(frozen=True, slots=True)
class FailureFilter:
    """A filter for failed tasks; all parts must hold. `name` is a glob, times are Unix seconds."""

    ids: Collection[str] = ()
    name: str = ""
    since: float = 0.0
    until: float = float("inf")
    where: Sequence[FilterCondition] = ()

    def holds(self, task: FailedTask) -> bool:
        """Return whether the task passes the filter."""
        return (
            (not self.ids or task.task_id in self.ids)
            and (not self.name or fits_glob(task.task, self.name))
            and self.since <= task.letter.buried_at < self.until
            and all(condition.holds(task) for condition in self.where)
        )


@dataclass(frozen=True, slots=True)
class RetryOutcome:
    """By the id of the failed task: the id of its retry, or why it was refused.

    `gone`: its message was no longer there, because another retry took it, or the limit of stored messages
    dropped it.
    """

    sent: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


async def find_failed(
    broker: Broker, wanted: FailureFilter, hides: Hides = hides_nothing
) -> list[FailedTask]:
    """Return matching failed tasks, newest first. `hides`: whose unmasked arguments are hidden."""
    letters: list[DeadLetter] = []
    if 0 < len(wanted.ids) <= ONE_BY_ONE_MAX:
        for task_id in wanted.ids:
            letters += await broker.failed(LOOK_MAX, task_id=task_id)
    else:
        letters += await broker.failed(LOOK_MAX)
    letters += await broker.dead_letters(LOOK_MAX)
    tasks = (failed_task(letter, hides) for letter in letters)
    found = [task for task in tasks if task is not None and wanted.holds(task)]
    return sorted(found, key=lambda failed: failed.letter.buried_at, reverse=True)


def failed_task(letter: DeadLetter, hides: Hides = hides_nothing) -> FailedTask | None:
    """Return the task of a dead letter; None if it is not a task's message."""
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
        attempt=headers.retries,
        args=MASK if is_hidden else headers.argsrepr,
        kwargs=MASK if is_hidden else headers.kwargsrepr,
        sender=headers.origin,
    )


async def retry_failed(
    broker: Broker,
    chosen: Iterable[FailedTask],
    *,
    accept: Collection[str] = ANY_CONTENT,
    reply_to: str | None = None,
    even_if_used: bool = False,
    only_verified: bool = False,
) -> RetryOutcome:
    """Retry each task once, however many of its messages there are; options as for `retry_message`."""
    done = RetryOutcome()
    newest: list[tuple[FailedTask, Outgoing]] = []
    older: list[Resend] = []
    seen: set[str] = set()
    signer = broker.signer
    # A message forged under a task's id must not replace the real one.
    for failed in sorted(
        chosen, key=lambda failed: (_is_vouched_for(failed, signer), _age_of(failed)), reverse=True
    ):
        if failed.task_id in seen:
            older.append(Resend(failed.letter, None))
            continue
        try:
            sent = retry_message(
                failed,
                signer,
                accept=accept,
                reply_to=reply_to,
                even_if_used=even_if_used,
                only_verified=only_verified,
            )
            newest.append((failed, sent))
        except WireError as error:
            done.refused[failed.task_id] = str(error)
            continue
        seen.add(failed.task_id)
    # The oldest failures run first. Surplus messages go before them: one that stayed would be retried later.
    newest.reverse()
    resent = await broker.resend([*older, *(Resend(failed.letter, sent) for failed, sent in newest)])
    for place, (failed, sent) in enumerate(newest, len(older)):
        if place in resent.sent:
            done.sent[failed.task_id] = sent.message.correlation_id
        elif place in resent.refused:
            done.refused[failed.task_id] = resent.refused[place]
        else:
            done.gone.append(failed.task_id)
    return done


def _is_vouched_for(failed: FailedTask, signer: Signer | None) -> bool:
    letter = failed.letter
    return signer is not None and bool(signer.letter(letter.message, letter.queue, letter.stored).nonce)


def _age_of(failed: FailedTask) -> float:
    return failed.letter.buried_at


async def retry_one(
    broker: Broker, task_id: str, *, accept: Collection[str], reply_to: str | None = None
) -> str:
    """Return the id of the new task. NotKept: the task has no message. BrokerRefused: it was not sent."""
    found = await find_failed(broker, FailureFilter(ids=(task_id,)))
    done = await retry_failed(broker, found, accept=accept, reply_to=reply_to)
    if task_id in done.sent:
        return done.sent[task_id]
    if task_id in done.refused:
        raise BrokerRefused(f"the task {task_id} cannot be retried: {done.refused[task_id]}")
    raise NotKept.of(task_id)


def retry_message(
    failed: FailedTask,
    signer: Signer | None,
    *,
    accept: Collection[str],
    reply_to: str | None = None,
    even_if_used: bool = False,
    only_verified: bool = False,
) -> Outgoing:
    """Return the message of the retry; raises WireError when there can be none.

    With keys it is signed if a worker vouches for the old message, or with `even_if_used` if the old one was
    signed with one of the keys. An unsigned message stays unsigned, and is refused if it must be
    `only_verified`. Only JSON is decoded then: any process may have written what is stored at the broker.
    """
    letter, nonce, is_signed = failed.letter, "", False
    if signer is not None:
        accept = ("json",)
        if letter.message.content_type != JSON_CONTENT:
            kind = letter.message.content_type
            raise BadMessage(
                f"where 'signing_keys' are set, only messages in JSON are retried, and this one is {kind!r}; "
                "send the task again"
            )
        known = signer.letter(letter.message, letter.queue, letter.stored)
        nonce, is_signed = known.nonce, not isinstance(known.proof, Doubted)
        if is_signed and not (nonce or even_if_used):
            raise BadMessage(
                "no worker vouches for this message: it may be a copy of one that ran; "
                "`umbel task retry --even-if-used` retries it all the same"
            )
        if only_verified and not is_signed:
            why = known.proof.reason if isinstance(known.proof, Doubted) else ""
            raise BadMessage(f"its message is not verified ({why}); send the task again")

    def derive(old: str) -> str:
        return str(uuid5(_NAMESPACE, f"{failed.kind}\n{letter.letter_id}\n{failed.task_id}\n{old}"))

    queue = letter.queue or letter.message.routing_key
    new = Outgoing(queue, retried(letter.message, derive, accept=accept, reply_to=reply_to))
    if signer is None:
        return new
    if not is_signed:
        return marked_unsigned(new, failed.task_id)
    return signer.sign_task(new, cluster_now(), nonce=nonce)
