"""Queues: their depths and pauses, dead letters, and the retained messages of failed tasks.

Dead letters and failures are streams. The ids of dead letters are those that people type. A failed message
gets there in the script that settles its task, and leaves in the one that sends the retry (`requeue.lua`), so
no crash loses one or sends it twice. The ids of failures are times of the server, so old ones are removed by
their ids.

Workers poll only the number of ready messages; the other counts take one command for each worker. A pause is
respected by `claim.lua` and by `waiting.py`.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import msgspec
from msgspec.structs import replace

from umbel.brokers.interface import (
    MOVED_AT_ONCE_MAX,
    BrokerSettings,
    DeadLetter,
    Depth,
    Pause,
    Refused,
    Resend,
    Resent,
)
from umbel.brokers.interface.connection import why_reserved
from umbel.brokers.redis.holding import envelope_max_bytes
from umbel.brokers.redis.keys import RESERVED, Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import BATCH_BYTES_MAX, delivery_tags, push, weight_of
from umbel.brokers.redis.replies import ServerRefused, checked, is_wrong_type
from umbel.brokers.redis.scripts import script
from umbel.brokers.refusals import partly_requeued, signed_for, still_too_large
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import seal, unseal
from umbel.wire.message import Outgoing
from umbel.wire.signing import Signer
from umbel.wire.values import UNREADABLE

# ---- pauses ----------------------------------------------------------------------------------------
#
# Which queues are not claimed from (`claim.lua` and `waiting.py` respect it); moving messages.

_encode = msgspec.json.Encoder().encode
_pause = msgspec.json.Decoder(Pause).decode
UNKNOWN = Pause(0.0)


async def set_pause(link: Link, keys: Keys, queue: str, mark: Pause) -> None:
    """Store the pause of a queue."""
    await link.call("HSET", keys.paused, queue, _encode(mark))


async def clear_pause(link: Link, keys: Keys, queue: str) -> bool:
    """Remove the pause; whether there was one."""
    return bool(await link.call("HDEL", keys.paused, queue))


async def fetch_pauses(link: Link, keys: Keys) -> dict[str, Pause]:
    """The paused queues, sorted by name."""
    found = await link.call("HGETALL", keys.paused)
    return {queue.decode(): _read(stored) for queue, stored in sorted(_pairs(found))}


async def paused_names(link: Link, keys: Keys) -> Sequence[bytes]:
    """The names of paused queues; none if the key has another type, as for claims."""
    with suppress(ServerRefused):
        found: list[bytes] = await link.call("HKEYS", keys.paused)
        return found
    return ()


def with_pauses(depths: Mapping[str, Depth], names: Sequence[bytes]) -> dict[str, Depth]:
    """The depths of all queues that hold something or are paused, with the pauses set."""
    halted = {name.decode() for name in names}
    found = {name: replace(depth, paused=name in halted) for name, depth in depths.items()}
    found |= {name: Depth(0, 0, 0, paused=True) for name in halted - found.keys()}
    return dict(sorted(found.items()))


async def move_waiting(link: Link, keys: Keys, source: str, target: str, limit: int) -> int:
    """Move waiting messages in one script; how many. BrokerRefused if the next is signed for its queue."""
    most = min(limit, MOVED_AT_ONCE_MAX)
    moved, is_signed = await link.run(keys.script("move"), keys.prefix, source, target, most)
    if is_signed and not moved:
        raise signed_for(source)
    return int(moved)


def _pairs(found: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(found[::2], found[1::2], strict=True))


def _read(stored: bytes) -> Pause:
    """The pause as stored. An unreadable one still pauses: claims look only at the queue's name."""
    with suppress(*UNREADABLE):
        return _pause(stored)
    return UNKNOWN


# ---- depths ----------------------------------------------------------------------------------------
#
# How full the queues are. Workers poll only the number of messages that are ready for them.


async def fetch_depths(link: Link, keys: Keys, only: Collection[str] | None) -> Mapping[str, Depth]:
    """The depths of all queues, or only the ready messages of these, with the pauses."""
    found = await (_all(link, keys) if only is None else _ready(link, keys, only))
    if only is not None and not found:
        return found
    return with_pauses(found, await paused_names(link, keys))


async def _all(link: Link, keys: Keys) -> dict[str, Depth]:
    found = await link.run(keys.script("depths"), keys.prefix)
    return {
        found[at].decode(): Depth(*found[at + 1 : at + 5])
        for at in range(0, len(found), 5)
        if any(found[at + 1 : at + 5])
    }


async def _ready(link: Link, keys: Keys, queues: Collection[str]) -> dict[str, Depth]:
    """The ready messages alone: the delayed, claimed and limited ones take one command for each worker."""
    await link.connect()
    commands = [("LLEN", key) for queue in queues for key in keys.lists_of(queue)]
    replies = await link.reply_to(link.send(commands)) if commands else []
    counts = iter(checked([0 if is_wrong_type(reply) else reply for reply in replies], link.address))
    ready = {queue: sum(next(counts) for _ in keys.lists_of(queue)) for queue in queues}
    return {queue: Depth(count, 0, 0) for queue, count in ready.items() if count}


# ---- dead letters ----------------------------------------------------------------------------------
#
# A stream of messages that were given up. Their ids are those of the stream, for people to type.

DROP_MAX = 1000  # in one command: other clients wait while it runs
_BURY, _REQUEUE = script("bury"), script("requeue")


async def fetch_dead_letters(link: Link, keys: Keys, limit: int) -> list[DeadLetter]:
    """The newest letters, newest first."""
    found = await link.call("XREVRANGE", keys.dead, "+", "-", "COUNT", limit)
    return [letter_of(keys, letter_id, fields) for letter_id, fields in found]


async def requeue_letters(
    link: Link,
    keys: Keys,
    letter_ids: Sequence[int | str],
    route: Callable[[Sequence[Outgoing]], Awaitable[Sequence[Outgoing]]],
    signer: Signer | None,
    *,
    even_if_used: bool,
    message_max_bytes: int,
) -> int:
    """Send the letters as new messages; how many there were.

    Each is one step that does nothing when another client requeued the letter meanwhile, so no letter is sent
    twice. A letter that its queue refuses stays; BrokerRefused names those at the end.
    """
    count = 0
    problems: dict[int, str] = {}
    for place, letter_id in enumerate(letter_ids):
        found = await link.call("XRANGE", keys.dead, letter_id, letter_id)
        if not found:
            continue
        letter, (aside, size) = letter_of(keys, *found[0]), _aside_of(found[0][1])
        if size > envelope_max_bytes(message_max_bytes):
            problems[place] = still_too_large(letter_id, size, message_max_bytes)
            continue
        if aside:
            key = keys.list_of(letter.queue, 0)
            count += await link.run(_REQUEUE, keys.dead, letter_id, key, "", aside)
            continue
        if not letter.queue and not letter.message.exchange:
            problems[place] = f"dead letter {letter_id} cannot be requeued: its queue is not known"
            continue
        outgoing = letter.requeued(signer, cluster_now(), even_if_used=even_if_used)
        try:
            first, *others = await route([outgoing])
            ((_, key, envelope),) = push(keys, [first])
            if not letter.message.headers:  # no readable envelope: its bytes go back unchanged
                envelope = letter.message.body
            sent = await link.run(_REQUEUE, keys.dead, letter_id, key, envelope, "")
            if sent and others:  # an exchange hands it to several queues
                await link.call_all(push(keys, others))
            count += sent
        except BrokerRefused as problem:
            problems[place] = str(problem)
    if problems:
        raise partly_requeued(count, problems)
    return count


async def drop_letters(link: Link, keys: Keys, letter_ids: Sequence[int | str]) -> int:
    """Remove letters for good, with the bytes of those that were never read; how many there were."""
    count = 0
    asides = dict(member.decode().split(" ", 1) for member in await link.call("ZRANGE", keys.asides, 0, -1))
    for start in range(0, len(letter_ids), DROP_MAX):
        ids = letter_ids[start : start + DROP_MAX]
        count += await link.call("XDEL", keys.dead, *ids)
        gone = {str(letter_id): asides[str(letter_id)] for letter_id in ids if str(letter_id) in asides}
        if gone:
            members = [" ".join(aside) for aside in gone.items()]
            await link.call_all([("UNLINK", *gone.values()), ("ZREM", keys.asides, *members)])
    return count


async def bury_messages(link: Link, keys: Keys, refused: Sequence[Refused]) -> None:
    """Put the messages among these into the stream."""
    for args in bury_arguments(keys, refused):
        await link.run(_BURY, *args)


def bury_arguments(keys: Keys, refused: Sequence[Refused], limits: str = "") -> Iterator[Sequence[Any]]:
    """The arguments of the script `bury` for each message among these; with `limits`, to retain failures."""
    for refusal in refused:
        if not isinstance(refusal.part, Outgoing) or weight_of(refusal.part) > BATCH_BYTES_MAX:
            continue  # the server would close the connection on a larger one; the refusal is logged already
        part, (tag,) = refusal.part.as_letter(), delivery_tags(1)
        key = keys.list_of(part.queue, part.message.priority if part.queue else 0)
        by, with_key = ("", "") if part.queue else (part.message.exchange, part.message.routing_key)
        envelope = seal(part.message, part.queue, tag, exchange=by, routing_key=with_key)
        yield keys.prefix, limits, key, envelope, refusal.reason.encode(errors="backslashreplace")


def letter_of(keys: Keys, letter_id: bytes, fields: list[Any], *, failed: bool = False) -> DeadLetter:
    """The letter of one entry. Fields may be missing: other programs can write to the stream."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return DeadLetter(
        letter_id=letter_id.decode(),
        queue=keys.queue_of(values.get(b"list", b"").decode(errors="replace")),
        message=unseal(values.get(b"envelope", b"")).message,
        stored=values.get(b"reason", b"").decode(errors="replace"),
        starts=int(_number(values.get(b"starts", b""))),
        buried_at=_number(values.get(b"at", b"")),
        failed=failed,
    )


def _aside_of(fields: list[Any]) -> tuple[bytes, int]:
    """The list with the bytes of an unread letter, and how many; an empty name for other letters."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return values.get(b"aside", b""), int(_number(values.get(b"size", b"")))


def _number(text: bytes) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0


# ---- failures --------------------------------------------------------------------------------------
#
# A stream of messages of failed tasks, retained to be retried.
#
# A message gets here in the script that settles its task, and leaves in the one that sends the retry
# (`requeue.lua`), so no crash loses one or sends it twice. The stream's ids are times of the server, so old
# entries are removed by their ids.

PAGE = 1000
_RETAIN, _RESEND = script("bury"), script("requeue")


def keep_limits(settings: BrokerSettings) -> str:
    """How many failures are retained and how long, as the scripts read it."""
    return f"{settings.failed_keep} {max(1, round(settings.failed_keep_s))}"


async def retain_failures(
    link: Link, keys: Keys, failed: Sequence[Refused], settings: BrokerSettings
) -> None:
    """Retain messages that were acknowledged before their tasks failed."""
    for args in bury_arguments(keys, failed, keep_limits(settings)):
        await link.run(_RETAIN, *args)


async def fetch_failures(
    link: Link, keys: Keys, limit: int, task_id: str, settings: BrokerSettings
) -> list[DeadLetter]:
    """Failures within their retention, newest first; those of one task if its id is given."""
    oldest = max(0, round((await _time_s(link) - settings.failed_keep_s) * 1000))
    found: list[DeadLetter] = []
    newest = "+"
    while len(found) < limit:
        page = await link.call("XREVRANGE", keys.failed, newest, oldest, "COUNT", PAGE)
        for letter_id, fields in page:
            letter = letter_of(keys, letter_id, fields, failed=True)
            if not task_id or letter.message.correlation_id == task_id:
                found.append(letter)
        if len(page) < PAGE:
            break
        newest = f"({page[-1][0].decode()}"
    return found[:limit]


async def resend_letters(link: Link, keys: Keys, asked: Sequence[Resend]) -> Resent:
    """Send each message in place of its letter, in one step; what was sent, and what was refused."""
    sent: set[int] = set()
    refused: dict[int, str] = {}
    for place, retry in enumerate(asked):
        stream = keys.failed if retry.letter.failed else keys.dead
        if retry.outgoing is None:
            await link.call("XDEL", stream, retry.letter.letter_id)
            continue
        if why := why_reserved(RESERVED, retry.outgoing.queue):
            refused[place] = why
            continue
        ((_, key, envelope),) = push(keys, [retry.outgoing])
        try:
            if await link.run(_RESEND, stream, retry.letter.letter_id, key, envelope):
                sent.add(place)
        except BrokerRefused as problem:
            refused[place] = str(problem)
    return Resent(frozenset(sent), refused)


async def trim_failures(link: Link, keys: Keys, settings: BrokerSettings) -> None:
    """Remove the failures past their retention."""
    oldest = max(0, round((await _time_s(link) - settings.failed_keep_s) * 1000))
    await link.call("XTRIM", keys.failed, "MINID", oldest)


async def _time_s(link: Link) -> float:
    seconds, microseconds = await link.call("TIME")
    return int(seconds) + int(microseconds) / 1e6
