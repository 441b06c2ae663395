"""Dead letters: a stream of messages that were given up; its ids are theirs, for people to type."""

from collections.abc import Sequence
from typing import Any

from umbel.brokers.interface import DeadLetter
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import push
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Outgoing


async def read(link: Link, keys: Keys, limit: int) -> list[DeadLetter]:
    """The newest letters, newest first."""
    found = await link.call("XREVRANGE", keys.dead, "+", "-", "COUNT", limit)
    return [_letter(keys, letter_id, fields) for letter_id, fields in found]


async def requeue(link: Link, keys: Keys, letter_ids: Sequence[int | str]) -> int:
    """Send the letters as new messages; how many there were.

    One by one, each in one transaction that is given up when somebody else requeued the letter
    meanwhile, so that no letter is sent twice.
    """
    count = 0
    for letter_id in letter_ids:
        found = await link.call("XRANGE", keys.dead, letter_id, letter_id)
        if not found:
            continue
        letter = _letter(keys, *found[0])
        (_, key, *envelopes), *_ = push(keys, [Outgoing(letter.queue, letter.message)])
        count += await link.call("EVAL", _MOVE, 0, keys.dead, letter_id, key, *envelopes)
    return count


def _letter(keys: Keys, letter_id: bytes, fields: list[Any]) -> DeadLetter:
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return DeadLetter(
        letter_id=letter_id.decode(),
        queue=keys.queue_of(values[b"list"].decode()),
        message=unseal(values[b"envelope"]).message,
        reason=values[b"reason"].decode(errors="replace"),
        starts=int(values[b"starts"]),
        buried_at=float(values[b"at"]),
    )


_MOVE = """
if redis.call('XDEL', ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('LPUSH', ARGV[3], ARGV[4])
return 1
"""
