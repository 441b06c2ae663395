"""Dead letters: a stream of messages that were given up; its ids are theirs, for people to type."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from math import isfinite
from typing import Any

from umbel.brokers.interface import DeadLetter, Refused
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import BATCH_BYTES_MAX, delivery_tags, push, weight_of
from umbel.brokers.redis.scripts import script
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import seal, unseal
from umbel.wire.message import Outgoing, outgoing_of_letter
from umbel.wire.signing import Keyring

DROP_MAX = 1000  # in one command: others wait while it runs
_BURY, _REQUEUE = script("bury"), script("requeue")


async def read(link: Link, keys: Keys, limit: int) -> list[DeadLetter]:
    """The newest letters, newest first."""
    found = await link.call("XREVRANGE", keys.dead, "+", "-", "COUNT", limit)
    return [letter_of(keys, letter_id, fields) for letter_id, fields in found]


async def requeue(
    link: Link,
    keys: Keys,
    letter_ids: Sequence[int | str],
    route: Callable[[Sequence[Outgoing]], Awaitable[Sequence[Outgoing]]],
    keyring: Keyring | None = None,
) -> int:
    """Send the letters as new messages; how many there were.

    One by one, each in one step that does nothing when somebody else requeued the letter meanwhile, so
    that no letter is sent twice. One that its queue refuses stays.
    """
    count = 0
    problems: dict[int, str] = {}
    for place, letter_id in enumerate(letter_ids):
        found = await link.call("XRANGE", keys.dead, letter_id, letter_id)
        if not found:
            continue
        letter = letter_of(keys, *found[0])
        if not letter.queue and not letter.message.exchange:
            problems[place] = f"dead letter {letter_id} cannot be requeued: its queue is not known"
            continue
        outgoing = outgoing_of_letter(letter.queue, letter.message)
        if keyring is not None:
            outgoing = keyring.requeued(outgoing, letter.reason, cluster_now())
        try:
            first, *others = await route([outgoing])
            ((_, key, envelope),) = push(keys, [first])
            if not letter.message.headers:  # no envelope that can be read: it goes back as it is
                envelope = letter.message.body
            sent = await link.run(_REQUEUE, keys.dead, letter_id, key, envelope)
            if sent and others:  # an exchange hands it to several queues
                await link.call_all(push(keys, others))
            count += sent
        except BrokerRefused as problem:
            problems[place] = str(problem)
    if problems:
        raise BrokerRefused(
            f"{count} dead letters requeued, {len(problems)} refused: {next(iter(problems.values()))}",
            places=[*problems],
        )
    return count


async def drop(link: Link, keys: Keys, letter_ids: Sequence[int | str]) -> int:
    count = 0
    for start in range(0, len(letter_ids), DROP_MAX):
        count += await link.call("XDEL", keys.dead, *letter_ids[start : start + DROP_MAX])
    return count


async def bury(link: Link, keys: Keys, refused: Sequence[Refused]) -> None:
    for args in letters(keys, refused):
        await link.run(_BURY, *args)


def letters(keys: Keys, refused: Sequence[Refused], limits: str = "") -> Iterator[Sequence[Any]]:
    """The arguments of the script `bury` for each message among these; with `limits`, to keep failures."""
    for one in refused:
        if not isinstance(one.part, Outgoing) or weight_of(one.part) > BATCH_BYTES_MAX:
            continue  # the server closes the connection on a larger one; who refused it has said so
        part, (tag,) = one.part.as_letter(), delivery_tags(1)
        key = keys.list_of(part.queue, part.message.priority if part.queue else 0)
        by, with_key = ("", "") if part.queue else (part.message.exchange, part.message.routing_key)
        envelope = seal(part.message, part.queue, tag, exchange=by, routing_key=with_key)
        yield keys.prefix, limits, key, envelope, one.reason.encode(errors="backslashreplace")


def letter_of(keys: Keys, letter_id: bytes, fields: list[Any], *, failed: bool = False) -> DeadLetter:
    """Fields may be missing: other programs can write to the stream."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return DeadLetter(
        letter_id=letter_id.decode(),
        queue=keys.queue_of(values.get(b"list", b"").decode(errors="replace")),
        message=unseal(values.get(b"envelope", b"")).message,
        reason=values.get(b"reason", b"").decode(errors="replace"),
        starts=int(_number(values.get(b"starts", b""))),
        buried_at=_number(values.get(b"at", b"")),
        failed=failed,
    )


def _number(text: bytes) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0
