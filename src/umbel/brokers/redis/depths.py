"""Depths: how full the queues are. What every worker asks again and again is only what is ready for it."""

from collections.abc import Collection, Mapping

from umbel.brokers.interface import Depth
from umbel.brokers.redis import pauses
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import checked, is_wrong_type


async def read(link: Link, keys: Keys, only: Collection[str] | None) -> Mapping[str, Depth]:
    found = await (_all(link, keys) if only is None else _ready(link, keys, only))
    if only is not None and not found:
        return found
    return pauses.with_pauses(found, await pauses.names(link, keys))


async def _all(link: Link, keys: Keys) -> dict[str, Depth]:
    found = await link.run(keys.script("depths"), keys.prefix)
    return {
        found[at].decode(): Depth(*found[at + 1 : at + 5])
        for at in range(0, len(found), 5)
        if any(found[at + 1 : at + 5])
    }


async def _ready(link: Link, keys: Keys, queues: Collection[str]) -> dict[str, Depth]:
    """The same without what is delayed, claimed and waits: that takes a question for each worker."""
    await link.connect()
    commands = [("LLEN", key) for queue in queues for key in keys.lists_of(queue)]
    replies = await link.reply_to(link.send(commands)) if commands else []
    counts = iter(checked([0 if is_wrong_type(one) else one for one in replies], link.address))
    ready = {queue: sum(next(counts) for _ in keys.lists_of(queue)) for queue in queues}
    return {queue: Depth(count, 0, 0) for queue, count in ready.items() if count}
