"""Listening: what a Redis server is asked to do, as its MONITOR shows it, sorted by what it is for.

A message is one PUBLISH. Those of an election are told by their channels: the command that starts
it goes out on the mailbox's, all else as `worker.elect…`. Store calls are the scripts by which an
election is opened and won; looking how it ended, which who waits for it does, is not counted.
"""

import re
import socket
import threading
from collections import Counter

import hiredis

from tests.servers.redis import RedisServer

ELECTION = "election"
STORE = "store"
OTHER = "other"

_PUBLISH = re.compile(r'\] "publish" "([^"]+)"', re.IGNORECASE)
_STORE = re.compile(r'\] "evalsha?" .*"(?:open|claim|start|renew|finish)" "[0-9a-f]{32}"', re.IGNORECASE)


class Listening:
    """Counts from the moment the block is entered."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._is_over = threading.Event()
        self._has_begun = threading.Event()

    def __enter__(self) -> "Listening":
        self._thread.start()
        assert self._has_begun.wait(10), "MONITOR does not answer"
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(10)

    def counts(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counts)

    def _listen(self) -> None:
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=10) as link:
            link.sendall(b"MONITOR\r\n")
            link.settimeout(0.2)
            reader = hiredis.Reader(encoding="utf-8", errors="replace")
            while not self._is_over.is_set():
                try:
                    data = link.recv(65536)
                except TimeoutError:
                    continue
                reader.feed(data)
                self._has_begun.set()
                while (line := reader.gets()) is not False:
                    self._take(str(line))

    def _take(self, line: str) -> None:
        kind = kind_of(line)
        if kind:
            with self._lock:
                self._counts[kind] += 1


def kind_of(line: str) -> str:
    """What a line of MONITOR is counted as; most are nothing of ours."""
    published = _PUBLISH.search(line)
    if published:
        channel = published[1]
        is_election = channel.endswith(".pidbox") or "worker.elect" in channel
        return ELECTION if is_election else OTHER
    return STORE if _STORE.search(line) else ""
