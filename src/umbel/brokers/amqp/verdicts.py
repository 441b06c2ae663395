"""Verdicts: how claims end on RabbitMQ.

Everything that a batch of verdicts sends is published and confirmed first: results for waiting clients,
follow-ups, dead letters, parked messages, counted starts. Then the messages are acknowledged or returned. A
crash in between repeats work and loses none. A message that the server refuses becomes a dead letter with the
reason. A claimed message that the server refuses everywhere stays claimed.

How starts are counted: RabbitMQ has no counter for a message of a classic queue, and a message cannot be
changed while it is claimed. So each counted start is an entry of the stream `umbel.starts`, written and
confirmed before the message runs; the worker that gets a redelivered message looks up its count. The limits
of this: two messages with one id in one queue share a count, and a message without an id is never counted.
"""

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec.structs import replace

from umbel.brokers.amqp import publishing, topology
from umbel.brokers.amqp.claims import Claimed, claim_tags
from umbel.brokers.amqp.consumer import Arrived, Consumer
from umbel.brokers.amqp.publishing import Post
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.signatures import end_signatures
from umbel.brokers.amqp.streams import attempt_of
from umbel.brokers.interface import (
    Ack,
    BrokerSettings,
    Bury,
    Refused,
    Return,
    Settled,
    Started,
    Tag,
    Verdict,
)
from umbel.brokers.refusals import log_refused
from umbel.clock import cluster_now
from umbel.errors import WireError
from umbel.wire.message import Outgoing, StoredResult

log = logging.getLogger("umbel.brokers.amqp")
INHERITED_S = 600.0  # how long the follow-ups of a redelivered message count as redelivered too


class Settling:
    """Applies verdicts on claims."""

    def __init__(self, sessions: Sessions, settings: BrokerSettings) -> None:
        self._sessions = sessions
        self._failed = topology.failed_queue(settings)
        self._remembers_signatures = settings.remembers_signatures

    async def settle(self, batch: Sequence[Verdict]) -> Settled:
        """Send everything that the verdicts ask for, then acknowledge or return the messages."""
        session = await self._sessions.get()
        judged = _Judgement(session, self._failed, cluster_now())
        judged.add(batch)
        if judged.posts or judged.unwritten:
            await judged.send()
        if self._remembers_signatures:
            with session.all_or_again(judged.posts):
                await end_signatures(session, batch, frozenset(judged.finished))
        gone = judged.end_claims()
        for owner in judged.owners:
            session.claims.touch(owner)
        conflicts = judged.conflicts | gone
        forgotten = self._sessions.unknown & conflicts
        self._sessions.unknown -= forgotten
        # Verdicts whose claims ended meanwhile have been sent; only returned messages were not.
        unknown = forgotten & (judged.conflicts | set(judged.returned))
        return Settled(
            judged.count - len(gone - forgotten),
            frozenset(conflicts - forgotten),
            tuple(judged.refused),
            unknown=frozenset(unknown),
        )

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Make dead letters of refused messages."""
        await bury(await self._sessions.get(), refused, cluster_now())

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Publish the messages of failed tasks to their queue; those that it refuses become dead letters."""
        session, now = await self._sessions.get(), cluster_now()
        failures: list[Refused] = []
        posts: list[Post] = []
        for failure in failed:
            if isinstance(failure.part, Outgoing):
                letter = failure.part.as_letter()
                failures.append(failure)
                posts.append(
                    publishing.kept_failure(
                        letter.queue, letter.message, failure.reason, 0, now, self._failed
                    )
                )
        refused = await session.try_send(posts)
        await _bury_failures(session, [(failures[place], why) for place, why in refused.items()], now)


class _Judgement:
    """What a batch of verdicts sends, and how it ends claims. Nothing changes before `send` and `end_claims`.

    `parts`, `own` and `failures` say what the posts carry, by their places.
    """

    def __init__(self, session: Session, failed: topology.Queue, now: float) -> None:
        self.conflicts: set[Tag] = set()
        self.posts: list[Post] = []
        self.unwritten: list[tuple[Tag | None, Refused]] = []
        self.refused: list[Refused] = []
        self.finished: list[Tag] = []
        self.returned: list[Tag] = []
        self.owners: set[str] = set()
        self.count = 0
        self._parts: dict[int, Outgoing | StoredResult] = {}
        self._own: dict[int, Tag] = {}  # the claimed message itself is in the post
        self._failures: dict[int, Refused] = {}  # messages of failed tasks, and why these failed
        self._rejected: set[Tag] = set()  # of the finished: to their queue's dead letter exchange
        self._started: list[Tag] = []
        self._session = session
        self._active = session.claims.active
        self._failed = failed
        self._now = now

    def add(self, batch: Sequence[Verdict]) -> None:
        """Sort the verdicts into what is to be sent and how the messages end."""
        active, ended = self._active, set[Tag]()
        counted: dict[Tag, int] = {}
        for verdict in batch:
            tag = verdict.tag
            claimed = active.get(tag)
            if claimed is None or tag in ended or not claimed.consumer.is_open:
                self.conflicts.add(tag)
                continue
            self.count += 1
            self.owners.add(claimed.owner)
            starts = counted.get(tag, claimed.starts)
            if isinstance(verdict, Started):
                counted[tag] = starts + 1
                self._started.append(tag)
                self._count_starts(claimed, starts + 1)
                continue
            ended.add(tag)
            match verdict:
                case Ack():
                    self.finished.append(tag)
                    if verdict.results or verdict.follow_ups:
                        self._carry(verdict, claimed)
                    if verdict.keep:
                        self._keep_failure(claimed, verdict.keep, starts)
                    self._end_count(claimed, starts)
                case Return():
                    self._return(verdict, claimed, starts)
                case Bury():
                    self.finished.append(tag)
                    self._carry(verdict, claimed)
                    if verdict.by_queue:
                        self._rejected.add(tag)
                    else:
                        self._bury(verdict, claimed, starts + verdict.charged)
                    self._end_count(claimed, starts)
                case _:
                    assert_never(verdict)

    async def send(self) -> None:
        """Send what the verdicts ask for; messages that the server refuses become dead letters."""
        refused = await self._session.try_send(self.posts)
        letters = list(self.unwritten)
        for place, reason in refused.items():
            if (part := self._parts.get(place)) is not None:
                letters.append((self._own.get(place), Refused(part, reason)))
            elif (tag := self._own.get(place)) is not None:  # the queue of dead letters refuses it too
                self._keep_claimed(tag)
        failures = [
            (self._failures[place], reason) for place, reason in refused.items() if place in self._failures
        ]
        self.refused = [letter for _, letter in letters]
        accepted = [post for place, post in enumerate(self.posts) if place not in refused]
        with self._session.all_or_again(accepted):
            await _bury_failures(self._session, failures, self._now)
            buried = await bury(self._session, self.refused, self._now)
        for (tag, _), is_buried in zip(letters, buried, strict=True):
            if tag is not None and not is_buried:
                self._keep_claimed(tag)

    def end_claims(self) -> set[Tag]:
        """End the claims; return those that had ended meanwhile."""
        active, gone = self._active, set[Tag]()
        by_consumer: dict[Consumer, list[int]] = {}
        for tag in self._started:
            if (claimed := active.get(tag)) is not None:
                claimed.starts += 1
        for tag in self.finished:
            claimed = active.pop(tag, None)
            if claimed is None or not claimed.consumer.is_open:
                gone.add(tag)
            elif tag in self._rejected:
                claimed.consumer.reject(claimed.delivery_tag)
            else:
                by_consumer.setdefault(claimed.consumer, []).append(claimed.delivery_tag)
        for consumer, tags in by_consumer.items():
            consumer.finish(tags)
        for tag in self.returned:
            claimed = active.pop(tag, None)
            if claimed is None or not claimed.consumer.is_open:
                gone.add(tag)
            else:
                claimed.consumer.give_back(claimed.delivery_tag)
        return gone

    def _keep_claimed(self, tag: Tag) -> None:
        """Leave the message claimed: its end could not be written anywhere."""
        self.finished.remove(tag)
        self.count -= 1

    def _bury(self, verdict: Bury, claimed: Claimed, starts: int) -> None:
        delivery = claimed.delivery
        self._own[len(self.posts)] = verdict.tag
        letter = (delivery.queue, delivery.message, verdict.reason, starts, self._now)
        self.posts.append(publishing.dead_letter(*letter, claim=verdict.tag))

    def _keep_failure(self, claimed: Claimed, reason: str, starts: int) -> None:
        delivery = claimed.delivery
        self._failures[len(self.posts)] = Refused(Outgoing(delivery.queue, delivery.message), reason)
        failure = (delivery.queue, delivery.message, reason, starts, self._now, self._failed)
        self.posts.append(publishing.kept_failure(*failure, claim=delivery.tag))

    def _carry(self, verdict: Ack | Bury, claimed: Claimed) -> None:
        """Add results and follow-ups.

        Follow-ups of a redelivered message may have been sent before, so for a while they may have run.
        """
        reply_to, since, queues = claimed.delivery.message.reply_to, claimed.since, self._session.queues
        for result in verdict.results if reply_to else ():
            self._write(None, result, publishing.result, reply_to)
        for follow_up in verdict.follow_ups:
            if since > self._now - INHERITED_S and not follow_up.redelivered:
                again = replace(follow_up, redelivered=True)
                self._write(None, again, publishing.task, queues, self._now, since)
            else:
                self._write(None, follow_up, publishing.task, queues, self._now)

    def _write(
        self,
        own: Tag | None,
        part: Outgoing | StoredResult,
        write: Callable[..., Post],
        *args: object,
    ) -> None:
        try:
            written = write(part, *args)
        except (WireError, ValueError) as error:
            why = f"the message cannot be encoded for RabbitMQ: {error}"
            self.unwritten.append((own, Refused(part, why)))
            return
        self._parts[len(self.posts)] = part
        if own is not None:
            self._own[len(self.posts)] = own
        self.posts.append(written)

    def _return(self, verdict: Return, claimed: Claimed, starts: int) -> None:
        """Return a message that is due, unless an earlier attempt may have parked it."""
        if claimed.used is not None:
            self.posts.append(publishing.freeing(claimed.used))
        if verdict.charged:
            self._count_starts(claimed, starts + verdict.charged)
        delivery, unanswered = claimed.delivery, self._session.unanswered
        ran = any((verdict.ran, verdict.charged, delivery.redelivered, starts))
        parking = [publishing.parking(verdict.tag)] if unanswered.given_up else []
        if verdict.not_before <= self._now and not unanswered.may_have_arrived(parking):
            name = delivery.message.correlation_id
            if name and not ran:
                self.posts.append(publishing.start_entry(delivery.queue, name, 0, unstarted=True))
            self.returned.append(verdict.tag)
            return
        parked = Outgoing(delivery.queue, delivery.message, verdict.not_before, ran)
        args = (self._session.queues, self._now, claimed.since, verdict.tag)
        self._write(verdict.tag, parked, publishing.parked, *args)
        self.finished.append(verdict.tag)

    def _end_count(self, claimed: Claimed, starts: int) -> None:
        """End the message's count. For a redelivered message this is recorded even without a count: a copy
        may still come.
        """
        if starts or claimed.delivery.redelivered:
            self._count_starts(claimed, 0)

    def _count_starts(self, claimed: Claimed, starts: int) -> None:
        delivery, name = claimed.delivery, claimed.delivery.message.correlation_id
        if name:
            attempt = attempt_of(delivery.message) if delivery.redelivered else None
            self.posts.append(publishing.start_entry(delivery.queue, name, starts, attempt=attempt))


async def park(session: Session, consumer: Consumer, early: Sequence[Arrived]) -> None:
    """Send messages that arrived before they are due to the next level of the delay ladder.

    A worker that dies before it acknowledges them leaves each of them twice, and RabbitMQ flags the first.
    """
    unstarted = await session.take_unstarted([(consumer, arrived) for arrived in early])
    posts, parked = list[Post](), list[Outgoing]()
    for arrived in early:
        arrived.claim = arrived.claim or next(claim_tags)
        state = arrived.state
        is_unstarted = (consumer.queue, arrived.message.correlation_id) in unstarted
        ran = state.ran or (arrived.redelivered and not is_unstarted)
        parked.append(Outgoing(consumer.queue, arrived.message, state.due, ran))
        args = (session.queues, cluster_now(), state.since, arrived.claim)
        posts.append(publishing.parked(parked[-1], *args))
    await send_or_bury(session, posts, parked)


async def send_or_bury(session: Session, posts: Sequence[Post], messages: Sequence[Outgoing]) -> None:
    """Send messages without a waiting caller; refused messages are logged and become dead letters."""
    refused = await session.try_send(posts)
    parts = [Refused(messages[place], why) for place, why in refused.items()]
    log_refused(parts)
    with session.all_or_again([post for place, post in enumerate(posts) if place not in refused]):
        await bury(session, parts, cluster_now())


async def bury(session: Session, refused: Sequence[Refused], now: float) -> list[bool]:
    """Make dead letters of the messages among these; return of each whether it is a dead letter now."""
    letters = {
        place: (refusal.part.as_letter(), refusal.reason)
        for place, refusal in enumerate(refused)
        if isinstance(refusal.part, Outgoing)
    }
    posts = {
        place: publishing.dead_letter(letter.queue, letter.message, reason, 0, now)
        for place, (letter, reason) in letters.items()
    }
    failed = await session.try_send(list(posts.values()))
    missing = {place for nth, place in enumerate(posts) if nth in failed}
    return [place in posts and place not in missing for place in range(len(refused))]


async def _bury_failures(session: Session, refused: Sequence[tuple[Refused, str]], now: float) -> None:
    """Make dead letters, which can be retried too, of failures that the queue of failures refused."""
    if not refused:
        return
    letters = [
        Refused(failure.part, f"{failure.reason}; it cannot be stored with the failed tasks: {why}")
        for failure, why in refused
    ]
    buried = await bury(session, letters, now)
    log_refused(letter for letter, is_buried in zip(letters, buried, strict=True) if is_buried)
    if lost := [letter for letter, is_buried in zip(letters, buried, strict=True) if not is_buried]:
        fields = {"count": len(lost), "why": lost[0].reason}
        log.error("cannot store failed tasks; `umbel task retry` cannot retry them", extra=fields)
