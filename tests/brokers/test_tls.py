"""TLS to both servers: with good certificates all works, with bad ones a line says what to do.

Both servers ask for a client's certificate, and both are good for 127.0.0.1 only.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import LONG_S, BrokerUnderTest, outgoing, result, run, take, texts
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer, free_port
from umbel.backends.registry import open_backend
from umbel.backends.rpc import Post, RpcBackend
from umbel.backends.rpc_amqp import AmqpPost
from umbel.backends.rpc_redis import RedisPost
from umbel.brokers.interface import Ack, BrokerSettings
from umbel.brokers.registry import open_broker, open_producer
from umbel.errors import BadURL, BrokerUnavailable


@dataclass(frozen=True, slots=True)
class Place:
    """A server that speaks TLS; `url` with the options of a client, and where else it could go wrong."""

    certificates: Certificates
    url: Callable[[str], str]
    elsewhere: Callable[[str], str]  # the same server under a name that its certificate does not have
    tls_to_plain_port: str
    plain_to_tls_port: str


def _amqp() -> Iterator[Place]:
    server = shared_server()
    assert server.certificates is not None
    vhost, plain, tls = server.new_vhost(), str(server.port), str(server.ports[3])
    yield Place(
        server.certificates,
        lambda options: server.tls_url(vhost, options=options),
        lambda options: server.tls_url(vhost, options=options, host="localhost"),
        server.tls_url(vhost, options=server.certificates.options).replace(tls, plain),
        server.url(vhost).replace(plain, tls),
    )


def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory, port = tmp_path_factory.mktemp("redis"), free_port()
    made = make_certificates(directory)
    files = {
        "tls-ca-cert-file": made.authority,
        "tls-cert-file": made.server.certificate,
        "tls-key-file": made.server.key,
    }
    server = RedisServer(
        directory, options={"tls-port": str(port), **{name: str(path) for name, path in files.items()}}
    )
    server.start()
    plain = str(server.port)
    yield Place(
        made,
        lambda options: f"rediss://127.0.0.1:{port}/0?{options}",
        lambda options: f"rediss://localhost:{port}/0?{options}",
        f"rediss://127.0.0.1:{plain}/0?{made.options}",
        f"redis://127.0.0.1:{port}/0",
    )
    server.stop()


@pytest.fixture(scope="module", params=["amqp", "redis"])
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from _amqp() if request.param == "amqp" else _redis(tmp_path_factory)


def works(url: str) -> None:
    """Both faces of a broker, there and back."""
    settings = BrokerSettings(url)
    producer = open_producer(settings)
    under_test = BrokerUnderTest(settings, producer.capabilities)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("b"))
            taken = (await take(broker)).deliveries
            assert sorted(texts(taken)) == ["a", "b"]
            assert (await broker.settle([Ack(one.tag) for one in taken])).applied == 2

    producer.publish(outgoing("a"))
    run(scenario())
    producer.close()
    under_test.close()


def open_post(settings: BrokerSettings) -> Post:
    kind = AmqpPost if settings.url.startswith("amqp") else RedisPost
    return kind(settings.url, settings)


def refusals(url: str) -> Iterator[str]:
    """What both faces say to an address."""
    settings = BrokerSettings(url, connect_timeout_s=1.0)
    with pytest.raises(BrokerUnavailable) as caught:
        open_producer(settings).publish(outgoing("a"))
    yield str(caught.value)
    with pytest.raises(BrokerUnavailable) as caught:
        run(open_broker(settings).open())
    yield str(caught.value)


def test_messages_go_there_and_back_over_tls(where: Place) -> None:
    works(where.url(where.certificates.options))


def test_a_large_message_goes_there_and_back_over_tls(where: Place) -> None:
    """Larger than any buffer on the way, and than a TLS record."""
    settings, large = BrokerSettings(where.url(where.certificates.options)), b"x" * 3_000_000
    (post,) = outgoing("large")

    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        await broker.publish([replace(post, message=replace(post.message, body=large))])
        (taken,) = (await take(broker)).deliveries
        assert taken.message.body == large
        await broker.settle([Ack(taken.tag)])
        await broker.close()

    run(scenario())


def test_results_are_waited_for_over_tls(where: Place) -> None:
    settings = BrokerSettings(where.url(where.certificates.options))
    backend, worker = open_backend("rpc://", settings), open_post(settings)
    assert isinstance(backend, RpcBackend)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(backend.wait, ["t"], LONG_S)
        worker.send([replace(result("t"), reply_to=backend.reply_to)])
        assert waiting.result(LONG_S) == {"t": result("t")}
    backend.close()
    worker.close()


def test_whoever_trusts_anybody_says_so(where: Place) -> None:
    client = where.certificates.client
    shown = f"ssl_certfile={client.certificate}&ssl_keyfile={client.key}"
    works(where.elsewhere(f"{shown}&ssl_cert_reqs=none"))
    works(where.elsewhere(f"{where.certificates.options}&ssl_check_hostname=false"))


def test_a_connection_that_the_server_ended_while_it_was_idle_is_replaced() -> None:
    """Also over TLS, where nobody can look at a socket without reading from it."""
    server = shared_server()
    assert server.certificates is not None
    vhost = server.new_vhost()
    producers = [
        open_producer(BrokerSettings(url))
        for url in (server.url(vhost), server.tls_url(vhost, options=server.certificates.options))
    ]
    for producer in producers:
        producer.publish(outgoing("a"))
    server.control("close_all_connections", "-p", vhost, "away")
    for producer in producers:
        producer.publish(outgoing("b"))
        producer.close()


def test_a_certificate_that_does_not_fit_is_one_clear_line(where: Place) -> None:
    made = where.certificates
    trusting, unknown = f"ssl_ca_certs={made.authority}", made.stranger
    shown = f"ssl_certfile={made.client.certificate}&ssl_keyfile={made.client.key}"
    for url, words in (
        (where.url(shown), "its certificate is not trusted"),
        (where.url(f"{shown}&ssl_ca_certs={unknown.certificate}"), "set ssl_ca_certs=FILE"),
        (where.elsewhere(made.options), "ssl_check_hostname=false"),
        (where.url(trusting), "ssl_certfile"),
        (
            where.url(f"{trusting}&ssl_certfile={unknown.certificate}&ssl_keyfile={unknown.key}"),
            "ssl_certfile",
        ),
        (where.url("ssl_ca_certs=/no/such/file"), "ssl_ca_certs=/no/such/file): No such file"),
        (
            where.url(f"{trusting}&ssl_certfile={made.client.certificate}&ssl_keyfile={unknown.key}"),
            "MISMATCH",
        ),
        (where.tls_to_plain_port, "TLS"),
        (where.plain_to_tls_port, "or a TLS port use"),
    ):
        for text in refusals(url):
            assert words in text and "\n" not in text and "guest:guest" not in text, (url, text)


@pytest.mark.parametrize("scheme", ["amqp", "redis"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ssl_ca_cert=ca.pem", "unknown option"),
        ("ssl_cert_reqs=maybe", "required or none"),
        ("ssl_check_hostname=perhaps", "true or false"),
        ("ssl_keyfile=key.pem", "ssl_certfile"),
    ],
)
def test_a_mistyped_option_is_refused_before_anything_is_tried(scheme: str, options: str, words: str) -> None:
    with pytest.raises(BadURL, match=words):
        open_producer(BrokerSettings(f"{scheme}s://localhost/?{options}"))
    with pytest.raises(BadURL, match="unknown option"):
        open_producer(BrokerSettings(f"{scheme}://localhost/?{options}"))
