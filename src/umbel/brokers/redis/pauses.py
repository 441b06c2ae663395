"""Pauses: which queues are not taken from (`claim.lua` and `waiting.py` heed it); moving messages."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from umbel.brokers.interface import MOVED_AT_ONCE_MAX, Depth, Pause
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import ServerRefused
from umbel.brokers.refusals import signed_for
from umbel.wire.values import UNREADABLE

_encode = msgspec.json.Encoder().encode
_pause = msgspec.json.Decoder(Pause).decode
UNKNOWN = Pause(0.0)


async def pause(link: Link, keys: Keys, queue: str, mark: Pause) -> None:
    await link.call("HSET", keys.paused, queue, _encode(mark))


async def resume(link: Link, keys: Keys, queue: str) -> bool:
    return bool(await link.call("HDEL", keys.paused, queue))


async def paused(link: Link, keys: Keys) -> dict[str, Pause]:
    found = await link.call("HGETALL", keys.paused)
    return {queue.decode(): _read(mark) for queue, mark in sorted(_pairs(found))}


async def names(link: Link, keys: Keys) -> Sequence[bytes]:
    """Of paused queues; none where a key of that name is something else, as for the claims."""
    with suppress(ServerRefused):
        found: list[bytes] = await link.call("HKEYS", keys.paused)
        return found
    return ()


def with_pauses(depths: Mapping[str, Depth], names: Sequence[bytes]) -> dict[str, Depth]:
    """The depths of the queues that hold something or are paused, which of them are."""
    halted = {name.decode() for name in names}
    found = {name: replace(depth, paused=name in halted) for name, depth in depths.items()}
    found |= {name: Depth(0, 0, 0, paused=True) for name in halted - found.keys()}
    return dict(sorted(found.items()))


async def move(link: Link, keys: Keys, source: str, target: str, limit: int) -> int:
    most = min(limit, MOVED_AT_ONCE_MAX)
    moved, is_signed = await link.run(keys.script("move"), keys.prefix, source, target, most)
    if is_signed and not moved:
        raise signed_for(source)
    return int(moved)


def _pairs(found: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(found[::2], found[1::2], strict=True))


def _read(mark: bytes) -> Pause:
    """What cannot be read pauses all the same: the claims look at the name alone."""
    with suppress(*UNREADABLE):
        return _pause(mark)
    return UNKNOWN
