"""Queues: their depths and pauses, dead letters, and the retained messages of failed tasks.

Workers poll only the number of ready messages; the other counts take one command for each worker. Claims
(`claims.lua`) and idle workers (`waiting.py`) respect a pause.

Dead letters and failures are streams. A dead letter's id is what people type. A failed message gets into its
stream in the script that settles its task, and leaves it in the one that sends the retry (`requeue`), so no
crash loses it or sends it twice. The ids of failures are times of the server, so old ones are removed by
their ids.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import msgspec

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
from umbel.brokers.redis.replies import ServerRefused, checked, is_wrong_type, time_of
from umbel.brokers.refusals import partly_requeued, signed_for, still_too_large
from umbel.brokers.rules import with_pauses
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import seal, unseal
from umbel.wire.message import Outgoing
from umbel.wire.signing import Signer
from umbel.wire.values import UNREADABLE

# ---- depths, pauses and moves ----------------------------------------------------------------------

_pause = msgspec.json.Decoder(Pause).decode


async def fetch_depths(link: Link, keys: Keys, only: Collection[str] | None) -> Mapping[str, Depth]:
    """The depths of all queues that hold a message or are paused; with `only`, just the ready messages of
    these.
    """
    if only is not None:
        depths = await _ready(link, keys, only)
        if not depths:
            return depths
        paused = await _paused_names(link, keys)
        return with_pauses(depths, paused & set(only))
    found = await link.run(keys.script("depths"))
    rows = [found[at : at + 5] for at in range(0, len(found), 5)]
    depths = {queue.decode(): Depth(*counts) for queue, *counts in rows if any(counts)}
    return with_pauses(depths, await _paused_names(link, keys))


async def _ready(link: Link, keys: Keys, queues: Collection[str]) -> dict[str, Depth]:
    """The ready messages alone: the delayed, claimed and limited ones take one command for each worker."""
    await link.connect()
    commands = [("LLEN", key) for queue in queues for key in keys.lists_of(queue)]
    replies = await link.reply_to(link.send(commands)) if commands else []
    counts = iter(checked([0 if is_wrong_type(reply) else reply for reply in replies], link.address))
    ready = {queue: sum(next(counts) for _ in keys.lists_of(queue)) for queue in queues}
    return {queue: Depth(count, 0, 0) for queue, count in ready.items() if count}


async def _paused_names(link: Link, keys: Keys) -> set[str]:
    """The names of paused queues; none if the key has another type, as for claims."""
    with suppress(ServerRefused):
        return {name.decode() for name in await link.call("HKEYS", keys.paused)}
    return set()


async def fetch_pauses(link: Link, keys: Keys) -> dict[str, Pause]:
    """The paused queues, sorted by name. An unreadable entry still pauses: claims look only at the name."""
    found = await link.call("HGETALL", keys.paused)
    pauses: dict[str, Pause] = {}
    for queue, stored in sorted(zip(found[::2], found[1::2], strict=True)):
        pauses[queue.decode()] = Pause(0.0)
        with suppress(*UNREADABLE):
            pauses[queue.decode()] = _pause(stored)
    return pauses


async def move_waiting(link: Link, keys: Keys, source: str, target: str, limit: int) -> int:
    """Move waiting messages in one script; how many. BrokerRefused if the next is signed for its queue."""
    most = min(limit, MOVED_AT_ONCE_MAX)
    moved, is_signed = await link.run(keys.script("move"), source, target, most)
    if is_signed and not moved:
        raise signed_for(source)
    return int(moved)


# ---- dead letters ----------------------------------------------------------------------------------

DROP_MAX = 1000  # in one command: other clients wait while it runs


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

    Each is one step that does nothing if another client has requeued the letter meanwhile, so no letter is
    sent twice. A letter that its queue refuses stays; BrokerRefused names these letters at the end.
    """
    count, requeue = 0, keys.script("requeue")
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
            count += await link.run(requeue, keys.dead, letter_id, key, "", aside)
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
            sent = await link.run(requeue, keys.dead, letter_id, key, envelope, "")
            if sent and others:  # an exchange routes it to several queues
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


async def bury_messages(link: Link, keys: Keys, refused: Sequence[Refused], limits: str = "") -> None:
    """Put the messages among these into the stream; with `limits`, among the retained failures."""
    for args in bury_arguments(keys, refused, limits):
        await link.run(keys.script("bury"), *args)


def bury_arguments(keys: Keys, refused: Sequence[Refused], limits: str = "") -> Iterator[Sequence[Any]]:
    """The arguments of the script `bury` for each message among these."""
    for refusal in refused:
        if not isinstance(refusal.part, Outgoing) or weight_of(refusal.part) > BATCH_BYTES_MAX:
            continue  # the server would close the connection on a larger message; its refusal is logged
        part, (tag,) = refusal.part.as_letter(), delivery_tags(1)
        key = keys.list_of(part.queue, part.message.priority if part.queue else 0)
        by, with_key = ("", "") if part.queue else (part.message.exchange, part.message.routing_key)
        envelope = seal(part.message, part.queue, tag, exchange=by, routing_key=with_key)
        yield limits, key, envelope, refusal.reason.encode(errors="backslashreplace")


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

PAGE = 1000


def keep_limits(settings: BrokerSettings) -> str:
    """How many failures are retained and how long, as the scripts read it."""
    return f"{settings.failed_keep} {max(1, round(settings.failed_keep_s))}"


async def fetch_failures(
    link: Link, keys: Keys, limit: int, task_id: str, settings: BrokerSettings
) -> list[DeadLetter]:
    """Failures within their retention, newest first; only those of one task if its id is given."""
    oldest = await _oldest_failure_ms(link, settings)
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
            if await link.run(keys.script("requeue"), stream, retry.letter.letter_id, key, envelope):
                sent.add(place)
        except BrokerRefused as problem:
            refused[place] = str(problem)
    return Resent(frozenset(sent), refused)


async def trim_failures(link: Link, keys: Keys, settings: BrokerSettings) -> None:
    """Remove the failures past their retention."""
    await link.call("XTRIM", keys.failed, "MINID", await _oldest_failure_ms(link, settings))


async def _oldest_failure_ms(link: Link, settings: BrokerSettings) -> int:
    return max(0, round((await server_time(link) - settings.failed_keep_s) * 1000))


async def server_time(link: Link) -> float:
    """The server's clock in Unix seconds."""
    return time_of(await link.call("TIME"))
