"""A worker whose certificates are wrong says so in one line and ends, without a traceback."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.ports import free_port
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
UNAVAILABLE = 69  # of sysexits.h
LONG_S = 120.0


@contextmanager
def _redis(directory: Path) -> Iterator[tuple[Certificates, str]]:
    made, port = make_certificates(directory), free_port()
    server = RedisServer(directory, options=made.of_redis(made.server, port))
    server.start()
    try:
        yield made, f"rediss://127.0.0.1:{port}/0?"
    finally:
        server.stop()


@contextmanager
def _amqp(_: Path) -> Iterator[tuple[Certificates, str]]:
    server = shared_server()
    assert server.certificates is not None
    yield server.certificates, f"{server.tls_url(server.new_vhost())}?"


@pytest.mark.scenario
@pytest.mark.parametrize("server", [_redis, _amqp])
def test_a_worker_with_a_wrong_certificate_says_so_and_ends(server: object, tmp_path: Path) -> None:
    assert callable(server)
    with ExitStack() as stack:
        made, url = stack.enter_context(server(tmp_path))
        trusting, mine = f"ssl_ca_certs={made.authority}", made.client.certificate
        cases = {
            "lost_key": (
                f"{trusting}&ssl_certfile={mine}&ssl_keyfile=/no/key",
                "cannot use ssl_keyfile=/no/key",
            ),
            "unknown": (f"ssl_certfile={mine}&ssl_keyfile={made.client.key}", "set ssl_ca_certs=FILE"),
            "unshown": (trusting, "a client certificate"),
        }
        with Cluster(tmp_path, TASKS_FILE) as cluster:
            running = {
                name: cluster.start_worker(
                    name, "-c", "1", wait=False, broker=url + options, broker_connection_wait_s=1.0
                )
                for name, (options, _) in cases.items()
            }
            for name, process in running.items():
                assert process.wait(LONG_S) == UNAVAILABLE
                *before, last = cluster.log(name).splitlines()
                assert last.startswith("umbel: cannot ") and cases[name][1] in last
                # One that may be about to come up is waited for, and that is said once.
                assert sum("retrying" in line for line in before) <= (name == "unshown")
                assert "Traceback" not in cluster.log(name) and "guest:guest" not in cluster.log(name)
