"""TLS to every server: with good certificates all works, with bad ones a line says what to do.

The servers and the sentinels ask for a client's certificate, and theirs are good for 127.0.0.1 only.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import LONG_S, BrokerUnderTest, outgoing, result, run, take, texts
from tests.servers.certificates import Certificates, Signed, make_certificates
from tests.servers.ports import free_port
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.sentinel import MASTER, WatchedOverTls
from umbel.backends.registry import open_backend
from umbel.backends.rpc import Post, RpcBackend
from umbel.backends.rpc_amqp import AmqpPost
from umbel.backends.rpc_redis import RedisPost
from umbel.brokers.interface import Ack, Attempt, BrokerSettings
from umbel.brokers.registry import open_async_producer, open_broker, open_producer
from umbel.errors import BadURL, BrokerUnavailable


@dataclass(frozen=True, slots=True)
class Place:
    """A server that speaks TLS; `url` with the options of a client, and where else it could go wrong."""

    certificates: Certificates
    url: Callable[[str], str]
    elsewhere: Callable[[str], str]  # the same server under a name that its certificate does not have
    expired: Callable[[str], str]  # a server whose certificate has expired
    tls_to_plain_port: str
    plain_to_tls_port: str
    others: tuple[tuple[str, str], ...] = ()  # more addresses, and what is said of each

    @property
    def scheme(self) -> str:
        return self.url("").partition(":")[0]


def _amqp() -> Iterator[Place]:
    server = shared_server()
    assert server.certificates is not None
    vhost, plain, tls = server.new_vhost(), str(server.port), str(server.ports[3])
    expired = str(server.listen_with(server.certificates.expired_server))
    yield Place(
        server.certificates,
        lambda options: server.tls_url(vhost, options=options),
        lambda options: server.tls_url(vhost, options=options, host="localhost"),
        lambda options: server.tls_url(vhost, options=options).replace(tls, expired),
        server.tls_url(vhost, options=server.certificates.options).replace(tls, plain),
        server.url(vhost).replace(plain, tls),
    )


def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory, port, old_port = tmp_path_factory.mktemp("redis"), free_port(), free_port()
    made = make_certificates(directory)
    servers = [
        RedisServer(directory, options=made.of_redis(made.server, port)),
        RedisServer(tmp_path_factory.mktemp("old"), options=made.of_redis(made.expired_server, old_port)),
    ]
    for server in servers:
        server.start()
    plain = str(servers[0].port)
    yield Place(
        made,
        lambda options: f"rediss://127.0.0.1:{port}/0?{options}",
        lambda options: f"rediss://localhost:{port}/0?{options}",
        lambda options: f"rediss://127.0.0.1:{old_port}/0?{options}",
        f"rediss://127.0.0.1:{plain}/0?{made.options}",
        f"redis://127.0.0.1:{port}/0",
    )
    for server in servers:
        server.stop()


def _sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("sentinels")
    made = make_certificates(directory)
    with WatchedOverTls(directory, made) as watched:
        plain, port = watched.sentinel(made.server)
        _, other = watched.sentinel(made.server)
        _, old = watched.sentinel(made.expired_server)
        _, astray = watched.sentinel(made.server, primary=watched.server.port)

        def url(options: str, *ports: int, host: str = "127.0.0.1") -> str:
            each = [f"sentinels://{host}:{one}/0?master_name={MASTER}&{options}" for one in ports]
            return ";".join(each)

        yield Place(
            made,
            lambda options: url(options, port, other),
            lambda options: url(options, port, host="localhost"),
            lambda options: url(options, old),
            url(made.options, plain),
            f"sentinel://127.0.0.1:{port}/0?master_name={MASTER}",
            (
                (
                    f"sentinel://127.0.0.1:{plain}/0?master_name={MASTER}",
                    f"127.0.0.1:{watched.tls_port} .named by a sentinel.: .* for a TLS port use sentinels://",
                ),
                (
                    url(made.options, astray),
                    f"127.0.0.1:{watched.server.port} .named by a sentinel.: .*if not, use sentinel://",
                ),
                (
                    url(f"{made.options}&sentinel_password=guest:guest", port),
                    f"the sentinel at 127.0.0.1:{port} refuses .* sentinel_password in the address",
                ),
            ),
        )


_PLACES = {"amqp": lambda _: _amqp(), "redis": _redis, "sentinels": _sentinels}


@pytest.fixture(scope="module", params=_PLACES)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from _PLACES[request.param](tmp_path_factory)


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


def refusals(url: str, timeout_s: float = LONG_S) -> Iterator[str]:
    """What a client that blocks, one that awaits and a worker are told of an address."""
    settings = BrokerSettings(url, connect_timeout_s=timeout_s)
    with pytest.raises(BrokerUnavailable) as caught:
        open_producer(replace(settings, connect_timeout_s=1.0)).publish(outgoing("a"))
    yield str(caught.value)

    async def send() -> None:
        producer = open_async_producer(settings)
        try:
            await producer.publish(outgoing("a"), Attempt())
        finally:
            await producer.close()

    with pytest.raises(BrokerUnavailable) as caught:
        run(send())
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
    works(where.elsewhere(f"{shown(where.certificates.client)}&ssl_cert_reqs=none"))
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
    server.close_connections(vhost)
    for producer in producers:
        producer.publish(outgoing("b"))
        producer.close()


def shown(one: Signed) -> str:
    return f"ssl_certfile={one.certificate}&ssl_keyfile={one.key}"


def wrong_certificates(where: Place) -> Iterator[tuple[str, str]]:
    """Addresses, and what is said of each: the problem, the option and its file, the remedy."""
    made, trusting = where.certificates, f"ssl_ca_certs={where.certificates.authority}"
    stranger = made.stranger
    yield where.url(shown(made.client)), "its certificate is not trusted: .*; set ssl_ca_certs=FILE to its"
    unknown = f"{shown(made.client)}&ssl_ca_certs={stranger.certificate}"
    yield where.url(unknown), f"not trusted: .*ssl_ca_certs={stranger.certificate} does not know it; set"
    yield (
        where.elsewhere(made.options),
        "mismatch.* 'localhost'; check the host, or set ssl_check_hostname=false",
    )
    yield where.expired(made.options), "the server's certificate .*has expired.*; renew it there"
    # What a server dislikes about a client it says late: the connection may have ended by then.
    yield where.url(trusting), "requires? a client certificate.* ssl_certfile=FILE"
    refused = "(does|may) not accept the certificate in ssl_certfile={}"
    yield where.url(f"{trusting}&{shown(stranger)}"), refused.format(stranger.certificate)
    old = made.expired_client.certificate
    words = (
        f"in ssl_certfile={old} has expired; renew it|may not accept the certificate in ssl_certfile={old}"
    )
    yield where.url(f"{trusting}&{shown(made.expired_client)}"), words
    plain = f"if not, use {where.scheme.removesuffix('s')}://|use the scheme without its last s"
    yield where.tls_to_plain_port, plain
    yield where.plain_to_tls_port, f"or a TLS port use {where.scheme}://"
    yield from where.others


def wrong_files(where: Place, directory: Path) -> Iterator[tuple[str, str]]:
    made, trusting = where.certificates, f"ssl_ca_certs={where.certificates.authority}"
    (text := directory / "text.pem").write_text("nothing of the kind")
    mine = made.client.certificate
    for options, words in (
        (
            "ssl_ca_certs=/no/file",
            "cannot use ssl_ca_certs=/no/file: No such file or directory; check the path",
        ),
        (f"ssl_ca_certs={text}", f"cannot use ssl_ca_certs={text}: it holds no certificate; name one in PEM"),
        (f"ssl_certfile={mine}&ssl_keyfile=/no/key", "cannot use ssl_keyfile=/no/key: No such file"),
        (
            f"ssl_certfile={mine}&ssl_keyfile={directory}",
            f"cannot use ssl_keyfile={directory}: Is a directory",
        ),
        (
            f"ssl_certfile={mine}&ssl_keyfile={text}",
            f"cannot use ssl_keyfile={text}: it holds no private key",
        ),
        (f"ssl_certfile={mine}", f"cannot use ssl_certfile={mine}: it holds no private key; set ssl_keyfile"),
        (f"ssl_certfile={text}", f"cannot use ssl_certfile={text}: it holds no certificate"),
        (
            f"ssl_certfile={mine}&ssl_keyfile={made.stranger.key}",
            f"ssl_keyfile={made.stranger.key}: the key is that of another certificate; check both",
        ),
    ):
        yield where.url(options if "ssl_ca_certs" in options else f"{trusting}&{options}"), words


def test_a_wrong_certificate_is_one_line_that_names_the_option_and_the_remedy(where: Place) -> None:
    for url, words in wrong_certificates(where):
        # A server that does not speak TLS waits for the end of what it takes for a command.
        is_silent = where.tls_to_plain_port == url or "if not, use" in words
        for text in refusals(url, 1.0 if is_silent else LONG_S):
            assert re.search(words, text) and "\n" not in text and "guest:guest" not in text, (url, text)


def test_a_file_that_cannot_be_used_is_named_with_its_option(where: Place, tmp_path: Path) -> None:
    for url, words in wrong_files(where, tmp_path):
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
