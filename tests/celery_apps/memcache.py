"""CacheServer: as much of memcached as Celery's cache backend uses, for where memcached is not installed.

The text protocol on a port of the loopback: get, gets, set, add, delete, incr, decr, touch, version. What is
stored lives as long as the server.
"""

import socketserver
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

CRLF = b"\r\n"


class CacheServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.stored: dict[bytes, tuple[bytes, bytes]] = {}  # key: flags and value
        self.guard = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()


class _Conversation(socketserver.StreamRequestHandler):
    server: CacheServer

    def handle(self) -> None:
        while line := self.rfile.readline():
            for part in self._answer(*line.split()):
                self.wfile.write(part + CRLF)

    def _answer(self, command: bytes, *words: bytes) -> Iterator[bytes]:
        match command:
            case b"get" | b"gets":
                yield from self._get(words)
            case b"set" | b"add":
                yield self._set(command, *words[:4])
            case b"delete" | b"touch":
                yield self._change(command, words[0])
            case b"incr" | b"decr":
                yield self._count(words[0], int(words[1]) * (1 if command == b"incr" else -1))
            case b"version":
                yield b"VERSION 1"
            case _:
                yield b"ERROR"

    def _get(self, keys: tuple[bytes, ...]) -> Iterator[bytes]:
        with self.server.guard:
            found = {key: self.server.stored[key] for key in keys if key in self.server.stored}
        for key, (flags, value) in found.items():
            yield b"VALUE %s %s %d" % (key, flags, len(value))
            yield value
        yield b"END"

    def _set(self, command: bytes, key: bytes, flags: bytes, _expires: bytes, size: bytes) -> bytes:
        value = self.rfile.read(int(size) + len(CRLF))[: -len(CRLF)]
        with self.server.guard:
            if command == b"add" and key in self.server.stored:
                return b"NOT_STORED"
            self.server.stored[key] = (flags, value)
        return b"STORED"

    def _change(self, command: bytes, key: bytes) -> bytes:
        with self.server.guard:
            if key not in self.server.stored:
                return b"NOT_FOUND"
            if command == b"touch":
                return b"TOUCHED"
            del self.server.stored[key]
        return b"DELETED"

    def _count(self, key: bytes, by: int) -> bytes:
        with self.server.guard:
            if key not in self.server.stored:
                return b"NOT_FOUND"
            flags, value = self.server.stored[key]
            counted = b"%d" % max(0, int(value) + by)
            self.server.stored[key] = (flags, counted)
        return counted
