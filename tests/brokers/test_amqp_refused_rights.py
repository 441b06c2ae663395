"""What a RabbitMQ user may not do is one line that names user, host and right, and how it is granted."""

import re
from collections.abc import Callable, Mapping

import pytest

from tests.brokers.under_test import LONG_S, OWNER, message, outgoing, run, take, texts
from tests.servers.rabbitmq import shared_server
from umbel.backends.registry import open_backend
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import Location, missing_right
from umbel.brokers.interface import Ack, Attempt, Broadcast, BrokerSettings
from umbel.brokers.registry import open_async_producer, open_broker, open_producer
from umbel.errors import AccessRefused, BrokerError, BrokerRefused
from umbel.wire.message import Outgoing

ALL = ".*"
Rights = tuple[str, str, str]  # to configure, to write, to read
HERE = Location("localhost", 5672, "shop", "ada", "secret", tls=False)


def blocking(settings: BrokerSettings, queue: str = "celery") -> None:
    producer = open_producer(settings)
    try:
        producer.publish(outgoing("a", queue=queue))
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
        try:
            await broker.open()
            await broker.claim(OWNER, ["celery"], 1)
            async with broker.subscribe("celeryev", ["#"]):
                await broker.broadcast([Broadcast("celeryev", "k", b"{}")], ttl_s=1.0)
        finally:
            await broker.close()

    run(start())


def waiting(settings: BrokerSettings) -> None:
    backend = open_backend("rpc://", settings)
    try:
        backend.wait(["t"], LONG_S)
    finally:
        backend.close()


def all_but(names: str) -> str:
    return f"^(?!({names})$)"


CASES: list[tuple[Rights, Callable[[BrokerSettings], None], str]] = [
    ((all_but("celery"), ALL, ALL), blocking, "configure the exchange 'celery'"),
    ((ALL, all_but("celery"), ALL), blocking, "write to the queue 'celery'"),
    ((ALL, ALL, all_but("celery")), blocking, "read from the exchange 'celery'"),
    ((ALL, all_but(r"amq\.default"), ALL), blocking, "write to the exchange 'amq.default'"),
    ((all_but(r"umbel\..*"), ALL, ALL), awaiting, "configure the queue 'umbel.facts'"),
    ((ALL, all_but(r"amq\.default"), ALL), awaiting, "write to the exchange 'amq.default'"),
    ((all_but("celery"), ALL, ALL), awaiting, "configure the exchange 'celery'"),
    ((all_but(r"umbel\..*"), ALL, ALL), working, "configure the queue 'umbel."),
    ((ALL, ALL, all_but(r"umbel\..*")), working, "read from the queue 'umbel."),
    ((ALL, ALL, all_but("celery|q")), working, "read from the exchange 'celery'"),
    ((all_but("celeryev.*"), ALL, ALL), working, "configure the exchange 'celeryev'"),
    ((ALL, all_but("celeryev"), ALL), working, "write to the exchange 'celeryev'"),
    ((ALL, ALL, all_but(r"celeryev\..*")), working, "read from the queue 'celeryev."),
    ((r"umbel\..*", ALL, ALL), waiting, "configure the queue '"),
    ((ALL, ALL, r"umbel\..*"), waiting, "read from the queue '"),
]
MAY_NOT_MAKE: Rights = (r"umbel\..*|celeryev.*", ALL, ALL)
MAY_NOT_WRITE: Rights = (ALL, all_but("orders"), ALL)


@pytest.fixture(scope="module")
def settings_of() -> Mapping[Rights, BrokerSettings]:
    """For each set of rights a user who has them, in a separate virtual host."""
    server = shared_server()
    rights = list(dict.fromkeys([*(one for one, _, _ in CASES), MAY_NOT_MAKE, MAY_NOT_WRITE]))
    made = [(f"u{number}", server.new_vhost(), one) for number, one in enumerate(rights)]
    server.allow(made)
    urls = [server.url(vhost).replace("guest:guest", f"{user}:word") for user, vhost, _ in made]
    return {one: BrokerSettings(url) for one, url in zip(rights, urls, strict=True)}


def as_guest(settings: BrokerSettings) -> BrokerSettings:
    return BrokerSettings(re.sub("//.*@", "//guest:guest@", settings.url))


@pytest.mark.parametrize(("rights", "work", "words"), CASES)
def test_a_missing_right_is_named_with_how_it_is_granted(
    settings_of: Mapping[Rights, BrokerSettings],
    rights: Rights,
    work: Callable[[BrokerSettings], None],
    words: str,
) -> None:
    settings = settings_of[rights]
    with pytest.raises(BrokerError) as caught:
        work(settings)
    text, (user, vhost) = str(caught.value), (settings.url[7:].partition(":")[0], settings.url.split("/")[-1])
    assert f"the user {user!r} may not {words}" in text and f"in the virtual host {vhost!r}" in text
    assert f"rabbitmqctl set_permissions -p {vhost} {user} '.*' '.*' '.*', or with the patterns" in text
    assert "\n" not in text and "word" not in text
    # A queue may be one of many; a user without what everything needs is refused as a whole, and so is a
    # worker without its only queue.
    is_shared = any(name in words for name in ("umbel.", "celeryev", "amq.")) or work is working
    assert isinstance(caught.value, AccessRefused if is_shared else BrokerRefused)


def test_a_wrong_password_or_host_is_not_tried_again() -> None:
    server = shared_server()
    host = server.new_vhost()
    url = server.url(host)
    server.allow([("stranger", server.new_vhost(), (ALL, ALL, ALL))])
    for wrong, words in (
        (url.replace(":guest@", ":guess@"), "refused the login of the user 'guest': check user and password"),
        (f"{url}s", f"has no virtual host '{host}s'; .* add it with rabbitmqctl add_vhost {host}s"),
        (
            url.replace("guest:guest", "stranger:word"),
            f"'stranger' may not use the virtual host '{host}'; .* set_permissions -p {host} stranger '",
        ),
    ):
        for work in (blocking, awaiting, working, waiting):
            with pytest.raises(AccessRefused, match=words):
                work(BrokerSettings(wrong))


def test_a_queue_that_is_there_is_used_by_a_user_who_may_not_make_it(
    settings_of: Mapping[Rights, BrokerSettings],
) -> None:
    settings = settings_of[MAY_NOT_MAKE]
    blocking(as_guest(settings))
    for work in (blocking, awaiting, working):
        work(settings)


def test_what_one_exchange_refuses_harms_nothing_else(settings_of: Mapping[Rights, BrokerSettings]) -> None:
    """Others are sent, the task is acknowledged, and what was refused is a dead letter."""
    settings = settings_of[MAY_NOT_WRITE]
    blocking(as_guest(settings), "orders")
    blocking(settings)
    refused = Outgoing("", message("refused"), exchange="orders", routing_key="orders")

    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        (claimed,) = (await take(broker)).deliveries
        settled = await broker.settle([Ack(claimed.tag, follow_ups=[refused, *outgoing("next")])])
        assert settled.applied == 1 and len(settled.refused) == 1
        assert "may not write to the exchange 'orders'" in settled.refused[0].reason
        assert texts((await take(broker)).deliveries) == ["next"]
        (letter,) = await broker.dead_letters()
        assert "set_permissions" in letter.reason
        await broker.close()

    run(scenario())


@pytest.mark.parametrize(
    ("text", "method", "words"),
    [
        (
            "access to queue 'q' in vhost 'shop' refused for user 'ada'",
            Method.QUEUE_PURGE,
            "read from the queue",
        ),
        ("read access to queue 'q' in vhost 'shop' refused for user 'ada'", 0, "read from the queue 'q'"),
        (
            "configure access to exchange 'q' in vhost 'shop' refused for user 'ada'",
            0,
            "configure the exchange",
        ),
        (
            "access to exchange 'q' in vhost 'shop' refused for user 'ada'",
            Method.EXCHANGE_BIND,
            "use the exchange",
        ),
        (
            "write access to topic 'k' in exchange 'q' in vhost 'shop' refused for user 'ada'",
            0,
            "write to the topic",
        ),
        ("no idea", 0, "do this (ACCESS_REFUSED - no idea)"),
    ],
)
def test_the_words_of_other_servers_are_known(text: str, method: int, words: str) -> None:
    right = missing_right(HERE, f"ACCESS_REFUSED - {text}", method)
    assert f"the user 'ada' may not {words}" in right.words and not right.is_shared
    assert "secret" not in right.words


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [
        ("umbel.facts", True),
        ("umbel.hold.leader", True),
        ("umbel.delay.celery.50", False),
        ("celeryev", True),
        ("celeryev.1", True),
        ("celeryevents", False),
        ("w@host.celery.pidbox", True),
        ("reply.celery.pidbox", True),
        ("celery", False),
    ],
)
def test_a_name_that_everything_needs_is_known(name: str, is_shared: bool) -> None:
    text = f"ACCESS_REFUSED - access to queue '{name}' in vhost 'shop' refused for user 'ada'"
    assert missing_right(HERE, text, Method.QUEUE_DECLARE).is_shared is is_shared
