"""Verdicts: what a worker decided on claimed messages, in the order that loses nothing.

Everything that a verdict sends is published and confirmed before the message is acknowledged. Who dies in
between repeats work. A verdict whose acknowledgement failed does not send again what it has sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.claims import Claimed, Claims
from umbel.brokers.gcpubsub.posts import Mark, Post
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import Ack, Bury, Refused, Return, Settled, Started, Tag, Verdict
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import seal
from umbel.wire.message import Outgoing

RESULTS = "Pub/Sub stores no results; set 'backend'"


@dataclass(slots=True)
class _Judged:
    applied: int = 0
    conflicts: set[Tag] = field(default_factory=set)
    sent: list[Post] = field(default_factory=list)
    follow_ups: list[Outgoing | None] = field(default_factory=list)  # what each post is for, if one asked
    refused: list[Refused] = field(default_factory=list)
    finished: dict[Tag, Claimed] = field(default_factory=dict)


async def settle(service: Service, claims: Claims, batch: Sequence[Verdict], now: float) -> Settled:
    judged = _Judged()
    for verdict in batch:
        claimed = None if verdict.tag in judged.finished else claims.find(verdict.tag)
        if claimed is None:
            judged.conflicts.add(verdict.tag)
        else:
            await _judge(service, judged, verdict, claimed, now)
            claims.touch(claimed.owner)
    await _send(service, judged, now)
    for claimed in judged.finished.values():
        claimed.is_posted = True
    gone = await _acknowledge(service, claims, judged)
    return Settled(judged.applied - len(gone), frozenset(judged.conflicts | gone), tuple(judged.refused))


async def bury(service: Service, refused: Sequence[Refused], now: float) -> None:
    letters = [_letter_of(one.part, one.reason, now) for one in refused if isinstance(one.part, Outgoing)]
    if letters:
        await service.make_dead()
        await _send_or_raise(service, letters)


async def _judge(service: Service, judged: _Judged, verdict: Verdict, claimed: Claimed, now: float) -> None:
    judged.applied += 1
    arrived, place = claimed.arrived, claimed.consumer.place
    if isinstance(verdict, Started):
        claimed.starts += 1
        return
    judged.finished[verdict.tag] = claimed
    if claimed.is_posted:
        return
    if isinstance(verdict, Return):
        starts = max(0, claimed.starts + int(verdict.charged))
        ran = arrived.redelivered or verdict.ran or starts > 0
        mark = Mark(starts, ran, max(verdict.not_before, 0.0))
        _add(judged, posts.again(arrived.data, place.queue, service.names, mark))
        return
    judged.refused += [Refused(one, RESULTS) for one in verdict.results]
    for one, why in (await _refused_by_name(service, verdict.follow_ups)).items():
        judged.refused.append(Refused(verdict.follow_ups[one], why))
        _add(judged, _letter_of(verdict.follow_ups[one], why, now))
    for outgoing in verdict.follow_ups:
        if not any(one.part is outgoing for one in judged.refused):
            try:
                _add(judged, posts.task(outgoing, service.names, now), outgoing)
            except BrokerRefused as error:
                judged.refused.append(Refused(outgoing, str(error)))
                _add(judged, _letter_of(outgoing, str(error), now))
    if isinstance(verdict, Bury):
        starts = claimed.starts + int(verdict.charged)
        _add(judged, posts.letter(place.queue, arrived.data, verdict.reason, starts, now))
    else:
        assert isinstance(verdict, Ack)


async def _refused_by_name(service: Service, follow_ups: Sequence[Outgoing]) -> dict[int, str]:
    return await service.make_for(follow_ups) if follow_ups else {}


def _add(judged: _Judged, post: Post, follow_up: Outgoing | None = None) -> None:
    judged.sent.append(post)
    judged.follow_ups.append(follow_up)


async def _send(service: Service, judged: _Judged, now: float) -> None:
    if not judged.sent:
        return
    await service.make_dead()
    refused = await service.try_send(judged.sent)
    letters: list[Post] = []
    for place, why in refused.items():
        follow_up = judged.follow_ups[place]
        if follow_up is None:
            raise BrokerRefused(why)
        judged.refused.append(Refused(follow_up, why))
        letters.append(_letter_of(follow_up, why, now))
    if letters:
        await _send_or_raise(service, letters)


async def _send_or_raise(service: Service, letters: Sequence[Post]) -> None:
    if problems := await service.try_send(letters):
        raise BrokerRefused(next(iter(problems.values())))


async def _acknowledge(service: Service, claims: Claims, judged: _Judged) -> set[Tag]:
    by_subscription: dict[str, dict[str, Tag]] = {}
    for tag, claimed in judged.finished.items():
        ids = by_subscription.setdefault(claimed.consumer.place.subscription, {})
        ids[claimed.arrived.ack_id] = tag
    gone: set[Tag] = set()
    for subscription, ids in by_subscription.items():
        late = await service.acknowledge(subscription, list(ids))
        gone |= {ids[one] for one in late}
        for tag in ids.values():
            claims.standing.pop(tag, None)
    return gone


def _letter_of(outgoing: Outgoing, reason: str, now: float) -> Post:
    letter = outgoing.as_letter()
    message = letter.message
    data = (
        seal(message, letter.queue, "", exchange=message.exchange, routing_key=message.routing_key)
        if message.headers
        else message.body
    )
    return posts.letter(letter.queue, data, reason, 0, now)
