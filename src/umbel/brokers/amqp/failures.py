"""Failures: messages of failed tasks in a queue of their own, whose limits let the oldest go.

One is published, and confirmed, before the message of its task is acknowledged. Who dies in between runs the
task again, and so may keep its message twice: who retries takes the newest of a task and removes the others.

A retry is published, and confirmed, before what it retries is acknowledged here, a portion at a time. Who is
killed in between finds the same letters again, and whoever makes the ids of retries from those of letters
sends the same messages again. So no retry is lost, and a repeated one has the id of the first.
"""

from collections.abc import Mapping, Sequence

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.dead_letters import letter_of, look, put_back, remove
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.topology import Queue
from umbel.brokers.amqp.verdicts import bury_unkept
from umbel.brokers.interface import DeadLetter, Refused, Resend, Resent
from umbel.clock import cluster_now
from umbel.wire.message import Outgoing

LOOK_MAX = 100_000


class KeptFailures:
    """What the broker does with failures."""

    _sessions: Sessions
    _failed: Queue

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        await keep(await self._sessions.get(), failed, cluster_now(), self._failed)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        return await read(await self._sessions.get(), limit, task_id)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        return await resend(await self._sessions.get(), letters, cluster_now())


async def keep(session: Session, failed: Sequence[Refused], now: float, into: Queue) -> None:
    letters = [one for one in failed if isinstance(one.part, Outgoing)]
    posts = []
    for one in letters:
        assert isinstance(one.part, Outgoing)
        letter = one.part.as_letter()
        posts.append(outbox.kept_failure(letter.queue, letter.message, one.reason, now, into))
    refused = await session.try_send(posts)
    await bury_unkept(session, [(letters[place], why) for place, why in refused.items()], now)


async def read(session: Session, limit: int, task_id: str) -> list[DeadLetter]:
    """Newest first. The newest are the last in the queue, so all are taken, looked at and put back."""
    if topology.FAILED not in await session.counts([topology.FAILED]):
        return []
    found, channel = await look(session.link, topology.FAILED, LOOK_MAX)
    letters = [letter_of(incoming, failed=True) for incoming in reversed(found)]
    await put_back(session, channel, topology.FAILED, len(found))
    return [one for one in letters if not task_id or one.message.correlation_id == task_id][:limit]


async def resend(session: Session, letters: Sequence[Resend], now: float) -> Resent:
    sent: set[int] = set()
    refused: dict[int, str] = {}
    for queue, is_failed in ((topology.FAILED, True), (topology.DEAD, False)):
        places = {
            one.letter.letter_id: place for place, one in enumerate(letters) if one.letter.failed is is_failed
        }
        if places:
            await _resend(session, queue, letters, places, now, sent, refused)
    return Resent(frozenset(sent), refused)


async def _resend(
    session: Session,
    queue: str,
    letters: Sequence[Resend],
    places: Mapping[int | str, int],
    now: float,
    sent: set[int],
    refused: dict[int, str],
) -> None:
    async def send(found: Sequence[DeadLetter]) -> dict[int, str]:
        asked = [letters[places[one.letter_id]].outgoing for one in found]
        posted = [nth for nth, outgoing in enumerate(asked) if outgoing is not None]
        posts = [outbox.task(outgoing, session.queues, now) for outgoing in asked if outgoing is not None]
        problems = {posted[nth]: why for nth, why in (await session.try_send(posts)).items()}
        refused.update({places[found[nth].letter_id]: why for nth, why in problems.items()})
        sent.update(places[found[nth].letter_id] for nth in posted if nth not in problems)
        return problems

    await remove(session, list(places), send, queue)
