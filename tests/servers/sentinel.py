"""A primary, its replica and three sentinels that watch them, on free ports of the loopback, or over TLS."""

import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.servers.certificates import Certificates, Signed
from tests.servers.ports import free_port
from tests.servers.redis import RedisServer, exchange
from tests.waiting import wait_until

MASTER = "orders"
SENTINELS = 3
DOWN_AFTER_MS = 500
LONG_S = 60.0


@dataclass
class Watched:
    servers: tuple[RedisServer, RedisServer]
    ports: tuple[int, ...]  # of the sentinels

    @property
    def url(self) -> str:
        first, *others = [f"sentinel://127.0.0.1:{port}/0" for port in self.ports]
        return ";".join([f"{first}?master_name={MASTER}", *others])

    @property
    def primary(self) -> RedisServer:
        """As the first sentinel knows it."""
        (named,) = exchange(self.ports[0], [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)])
        assert isinstance(named, list)
        return next(server for server in self.servers if server.port == int(named[1]))

    def is_ready(self) -> bool:
        """Whether every sentinel knows the others and a replica that is fit to take over."""
        return all(
            (told := self._told(port))[b"num-slaves"] == b"1"
            and told[b"num-other-sentinels"] == b"%d" % (SENTINELS - 1)
            and told[b"flags"] == b"master"
            and self._replica_is_fit(port)
            for port in self.ports
        )

    def _replica_is_fit(self, port: int) -> bool:
        (replicas,) = exchange(port, [("SENTINEL", "REPLICAS", MASTER)])
        assert isinstance(replicas, list)
        told = _pairs(replicas[0])
        return told[b"flags"] == b"slave" and told[b"master-link-status"] == b"ok"

    def _told(self, port: int) -> dict[bytes, bytes]:
        (told,) = exchange(port, [("SENTINEL", "MASTER", MASTER)])
        return _pairs(told)


def _pairs(flat: object) -> dict[bytes, bytes]:
    assert isinstance(flat, list)
    return dict(zip(flat[::2], flat[1::2], strict=True))


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    options = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
    servers = (
        RedisServer(_made(directory / "one"), options=options),
        RedisServer(_made(directory / "two"), options=options),
    )
    sentinels: list[subprocess.Popen[bytes]] = []
    try:
        for server in servers:
            server.start()
        servers[1].ask("REPLICAOF", "127.0.0.1", servers[0].port)
        ports = tuple(free_port() for _ in range(SENTINELS))
        sentinels += [_sentinel(_made(directory / str(port)), port, servers[0].port) for port in ports]
        found = Watched(servers, ports)
        wait_until(lambda: _answers(ports), what="the sentinels to answer")
        wait_until(found.is_ready, deadline_s=LONG_S, what="the sentinels to know each other")
        yield found
    finally:
        _end(sentinels)
        for server in servers:
            server.resume()
            server.stop()


@dataclass
class WatchedOverTls:
    """A primary that speaks TLS, and sentinels that do; all have a plain port as well."""

    directory: Path
    made: Certificates
    server: RedisServer = field(init=False)
    tls_port: int = field(init=False)  # of the primary
    _sentinels: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> "WatchedOverTls":
        self.tls_port = free_port()
        options = self.made.of_redis(self.made.server, self.tls_port) | {"tls-replication": "yes"}
        self.server = RedisServer(_made(self.directory / "primary"), options=options)
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._sentinels)
        self.server.stop()

    def sentinel(self, shown: Signed, *, primary: int = 0) -> tuple[int, int]:
        """The plain and the TLS port of one more, which shows this certificate and names that primary."""
        port, tls_port = free_port(), free_port()
        settings = self.made.of_redis(shown, tls_port) | {"tls-replication": "yes"}
        directory = _made(self.directory / str(port))
        self._sentinels.append(_sentinel(directory, port, primary or self.tls_port, settings))
        wait_until(lambda: _answers((port,)), what="the sentinel to answer")
        return port, tls_port


def _sentinel(
    directory: Path, port: int, primary: int, settings: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    program = shutil.which("redis-server")
    assert program, "redis-server is missing: apt-get install redis-server"
    lines = (
        *(f"{name} {value}" for name, value in settings.items()),
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {directory}",
        f"sentinel monitor {MASTER} 127.0.0.1 {primary} 2",
        f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
        f"sentinel failover-timeout {MASTER} 4000",
    )
    path = directory / "sentinel.conf"
    path.write_text("\n".join(lines) + "\n")
    with (directory / "sentinel.log").open("ab") as log:
        return subprocess.Popen([program, str(path), "--sentinel"], stdout=log, stderr=log)


def _end(sentinels: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in sentinels:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def _answers(ports: tuple[int, ...]) -> bool:
    try:
        return all(exchange(port, [("PING",)]) for port in ports)
    except OSError:
        return False


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
