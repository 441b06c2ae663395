"""A way to a server that tests can break: forwarding, cut, silent, or closed."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.servers.ports import free_ports

FIRST_WORDS_MAX = 1000


class Way:
    """Listens on a free port and forwards to the target until told otherwise."""

    def __init__(
        self,
        target_port: int,
        host: str = "127.0.0.1",
        watch: Callable[[bytes, bool], None] | None = None,
    ) -> None:
        """`watch` is called with all that passes, and whether the client sends it; by several threads."""
        self.port = free_ports(1)[0]
        self._host = host
        self._watch = watch
        self.accepted = 0  # connections, of all its time
        self._target_port = target_port
        self._flows = threading.Event()
        self._flows.set()
        self._spared: bytes | None = None
        self._listener: socket.socket | None = None
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.open()

    def open(self) -> None:
        listener = socket.create_server((self._host, self.port))
        self._listener = listener
        self._begin(lambda: self._accept(listener))

    def cut(self) -> None:
        """Every connection ends; new ones are let through."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Connections stay, and nothing gets through any more: a black hole."""
        self._flows.clear()

    def hold(self) -> None:
        """Every connection ends; new ones are taken, but nothing gets through until `resume`."""
        self.silence()
        self.cut()

    def resume(self) -> None:
        self._flows.set()

    def silence_all_but(self, marked: bytes) -> None:
        """A black hole, except for connections that said this in their first words."""
        self._spared = marked
        self.silence()

    def close(self) -> None:
        """Refuse from now on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._flows.set()
        self.cut()

    def end(self) -> None:
        self.close()
        for thread in self._threads:
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target_port))
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends += (near, far)
                self.accepted += 1
                said = bytearray()
                self._begin(lambda near=near, far=far, said=said: self._pump(near, far, said, speaks=True))
                self._begin(lambda near=near, far=far, said=said: self._pump(far, near, said))

    def _pump(
        self, source: socket.socket, sink: socket.socket, said: bytearray, *, speaks: bool = False
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if speaks and len(said) < FIRST_WORDS_MAX:
                    said += data
                if self._spared is None or self._spared not in said:
                    self._flows.wait()
                if self._watch is not None:
                    self._watch(data, speaks)
                sink.sendall(data)
        if speaks and self._watch is not None:  # what the server has sent meanwhile is to be seen, too
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            source.close()
            return
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def _begin(self, work: object) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()
