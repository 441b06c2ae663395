"""What a Redis user may not do is one line that names the right and how it is granted."""

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from tests.brokers.test_redis_rights import documented_rights
from tests.brokers.under_test import outgoing, run
from tests.servers.redis import RedisServer
from umbel.backends.registry import open_backend
from umbel.brokers.interface import Attempt, BrokerSettings
from umbel.brokers.redis.replies import missing_right
from umbel.brokers.registry import open_async_producer, open_broker, open_producer
from umbel.errors import AccessRefused, BrokerError, BrokerRefused

_NUMBERS = count()


def blocking(settings: BrokerSettings) -> None:
    producer = open_producer(settings)
    try:
        producer.publish(outgoing("a"))
    finally:
        producer.close()


def awaiting(settings: BrokerSettings) -> None:
    async def send() -> None:
        producer, attempt = open_async_producer(settings), Attempt()
        try:
            await producer.publish(outgoing("a"), attempt)
        except AccessRefused:
            assert not attempt.is_out  # a no is an answer
            raise
        finally:
            await producer.close()

    run(send())


def working(settings: BrokerSettings) -> None:
    async def start() -> None:
        broker = open_broker(settings)
        await broker.open()
        try:
            await broker.renew("w")
        finally:
            await broker.close()

    run(start())


def waiting(settings: BrokerSettings) -> None:
    backend = open_backend(settings.url, settings)
    try:
        backend.wait(["t"], 0.1)
    finally:
        backend.close()


def waiting_awaited(settings: BrokerSettings) -> None:
    backend = open_backend(settings.url, settings)

    async def wait() -> None:
        await backend.wait_async(["t"], 10.0)

    try:
        asyncio.run(wait())
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("work", "without", "granted"),
    [
        (blocking, ["-lpush"], "+lpush"),
        (blocking, ["resetkeys", "~other"], "~celery"),
        (awaiting, ["-evalsha"], "+evalsha"),
        (awaiting, ["-lpush"], "+lpush"),  # in a script
        (awaiting, ["resetkeys", "~other"], "~celery"),
        (working, ["-client|setname"], "+client|setname"),
        (working, ["-zadd"], "+zadd"),  # in a script that goes on without it
        (working, ["-time"], "+time"),
        (working, ["resetkeys", "~other"], "~*"),
        (waiting, ["-subscribe"], "+subscribe"),
        (waiting, ["resetchannels", "&other"], "&*"),
        (waiting_awaited, ["resetchannels", "&other"], "&*"),
    ],
)
def test_a_missing_right_is_named_with_how_it_is_granted(
    redis_server: RedisServer, work: Callable[[BrokerSettings], None], without: list[str], granted: str
) -> None:
    user = f"u{next(_NUMBERS)}"
    redis_server.ask(*(user if word == "umbel" else word for word in documented_rights()), *without)
    settings = BrokerSettings(redis_server.url.replace("redis://", f"redis://{user}:word@"))
    with pytest.raises(BrokerError, match="does not permit") as caught:
        work(settings)
    text = str(caught.value)
    assert f"ACL SETUSER {user} {granted}, or all that docs/brokers.md lists" in text
    assert f"to the user {user!r}" in text and "\n" not in text and "word" not in text
    # A key may be one of many queues; a user without a command or a channel is refused as a whole.
    assert isinstance(caught.value, BrokerRefused if "~" in granted else AccessRefused)


def test_a_wrong_password_is_not_tried_again(redis_server: RedisServer) -> None:
    redis_server.ask(*documented_rights())
    settings = BrokerSettings(redis_server.url.replace("redis://", "redis://umbel:guess@"))
    for work in (blocking, awaiting, working, waiting, waiting_awaited):
        with pytest.raises(AccessRefused, match="refuses the user name or password; check them in the addr"):
            work(settings)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("NOPERM User shop has no permissions to run the 'lpush' command", "+lpush"),
        ("NOPERM No permissions to access a key", "~*"),
        ("NOPERM No permissions to access a channel", "&*"),
        ("ERR ACL failure in script: User shop has no permissions to run the 'xadd' command", "+xadd"),
        (
            "REFUSED the key 'q' cannot be used: ERR ACL failure in script: No permissions to access a key",
            "~q",
        ),
        ("ERR The user executing the script can't run this command or subcommand", "ACL LOG"),
    ],
)
def test_the_words_of_later_servers_are_known(text: str, right: str) -> None:
    found = missing_right(text, "shop")
    assert found is not None and right in found.words


def test_another_error_is_not_about_rights() -> None:
    assert missing_right("WRONGTYPE Operation against a key holding the wrong kind of value", "shop") is None
