"""Failures: a stream of messages of failed tasks, kept to be retried.

A message comes here in the script that settles its task, and leaves in the one that sends the retry
(`requeue.lua`), so no crash loses one or sends it twice. The stream's ids are times of the server, so those
that are too old are removed by their ids.
"""

from collections.abc import Sequence

from umbel.brokers.interface import BrokerSettings, DeadLetter, Refused, Resend, Resent
from umbel.brokers.redis.dead_letters import letter_of, letters
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import push
from umbel.brokers.redis.scripts import script
from umbel.errors import BrokerRefused

PAGE = 1000
_BURY, _REQUEUE = script("bury"), script("requeue")


def keep_limits(settings: BrokerSettings) -> str:
    """As the scripts read them."""
    return f"{settings.failed_keep} {max(1, round(settings.failed_keep_s))}"


async def keep(link: Link, keys: Keys, failed: Sequence[Refused], settings: BrokerSettings) -> None:
    for args in letters(keys, failed, keep_limits(settings)):
        await link.run(_BURY, *args)


async def read(
    link: Link, keys: Keys, limit: int, task_id: str, settings: BrokerSettings
) -> list[DeadLetter]:
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


async def resend(link: Link, keys: Keys, asked: Sequence[Resend]) -> Resent:
    sent: set[int] = set()
    refused: dict[int, str] = {}
    for place, one in enumerate(asked):
        stream = keys.failed if one.letter.failed else keys.dead
        if one.outgoing is None:
            await link.call("XDEL", stream, one.letter.letter_id)
            continue
        ((_, key, envelope),) = push(keys, [one.outgoing])
        try:
            if await link.run(_REQUEUE, stream, one.letter.letter_id, key, envelope):
                sent.add(place)
        except BrokerRefused as problem:
            refused[place] = str(problem)
    return Resent(frozenset(sent), refused)


async def sweep(link: Link, keys: Keys, settings: BrokerSettings) -> None:
    oldest = max(0, round((await _time_s(link) - settings.failed_keep_s) * 1000))
    await link.call("XTRIM", keys.failed, "MINID", oldest)


async def _time_s(link: Link) -> float:
    seconds, microseconds = await link.call("TIME")
    return int(seconds) + int(microseconds) / 1e6
