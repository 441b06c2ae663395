"""A link that many senders share leaves the loop time for others, whatever the server does (C1)."""

import asyncio
from collections import Counter

import pytest

from tests.brokers.under_test import run
from tests.servers.redis import RedisServer
from tests.waiting import until
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.link import ANSWERED_MAX, Link
from umbel.errors import BrokerUnavailable

SENDERS = 5 * ANSWERED_MAX


class Rounds:
    """Who went on in which round of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self.begun = 0
        self.went_on: Counter[int] = Counter()
        self._next()

    def _next(self) -> None:
        self._number += 1
        self._loop.call_soon(self._next)

    async def send(self, link: Link) -> str:
        self.begun += 1
        try:
            reply = (await link.call("ECHO", "here")).decode()
        except BrokerUnavailable:
            reply = "lost"
        self.went_on[self._number] += 1
        return str(reply)


async def while_silent(redis: RedisServer, end: str) -> tuple[list[str], Counter[int]]:
    link = Link(parse_addresses(redis.url), timeout_s=60.0, gathers=True)
    await link.connect()
    redis.pause()
    rounds = Rounds()
    sending = [asyncio.create_task(rounds.send(link)) for _ in range(SENDERS)]
    await until(lambda: rounds.begun == SENDERS, "all to have sent")
    if end == "the link is closed":
        link.close()
    redis.resume()
    replies = await asyncio.gather(*sending)
    link.close()
    return replies, rounds.went_on


@pytest.mark.parametrize(
    ("end", "reply"), [("the server answers", "here"), ("the link is closed", "lost")], ids=str
)
def test_few_of_those_who_wait_go_on_in_one_round(redis_server: RedisServer, end: str, reply: str) -> None:
    replies, went_on = run(while_silent(redis_server, end))
    assert replies == [reply] * SENDERS
    assert max(went_on.values()) <= ANSWERED_MAX
