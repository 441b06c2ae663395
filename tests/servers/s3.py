"""A private S3: moto's server, a process on a free port of the loopback, whose failures are ordered.

    python -m tests.servers.s3     says its port in a line, and serves until its stdin ends

`s3` is one server for all tests of a process, with the variables of AWS set to it.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from umbel.stores import s3 as ours

ORDERS = "/_orders"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
ANSWERS = {503: ("503 Slow Down", SLOW_DOWN), 403: ("403 Forbidden", DENIED)}


class S3Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.s3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def stop(self) -> None:
        self._process.terminate()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)

    def make_bucket(self) -> str:
        name = f"bucket-{uuid4().hex[:12]}"
        urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=10).close()
        return name

    def order(self, *faults: dict[str, Any]) -> None:
        """`method` and `with`: of which requests; `status`, or `wait_s`; `times`: of how many."""
        data = json.dumps(faults).encode()
        urlopen(Request(f"{self.endpoint}{ORDERS}", data=data, method="PUT"), timeout=10).close()

    def asked(self) -> list[str]:
        """The requests since the last orders: method, path and parameters."""
        with urlopen(f"{self.endpoint}{ORDERS}", timeout=10) as answer:
            found: list[str] = json.load(answer)
        return found


class Faulty:
    """An application with what was ordered before it."""

    def __init__(self, inner: Callable[..., Iterable[bytes]]) -> None:
        self._inner = inner
        self._faults: list[dict[str, Any]] = []
        self._asked: list[str] = []
        self._lock = threading.Lock()
        self._released = threading.Event()  # who waits, by new orders

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        told = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        if environ["PATH_INFO"] == ORDERS:
            return self._take_orders(environ, start)
        with self._lock:
            self._asked.append(told)
            fault = self._fault_of(told)
            released = self._released
        if "wait_s" in fault:
            released.wait(fault["wait_s"])
        if "status" not in fault:
            return self._inner(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, body = ANSWERS[fault["status"]]
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def _fault_of(self, told: str) -> dict[str, Any]:
        for fault in self._faults:
            if told.startswith(fault["method"]) and fault.get("with", "") in told and fault["times"] > 0:
                fault["times"] -= 1
                return fault
        return {}

    def _take_orders(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        body = b""
        with self._lock:
            if environ["REQUEST_METHOD"] == "PUT":
                self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self._asked = []
                self._released.set()
                self._released = threading.Event()
            else:
                body = json.dumps(self._asked).encode()
        start("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def main() -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, without faults, as the one that this process and those it starts use."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    ours._file_system.cache_clear()
    yield s3_server
    s3_server.order()
    ours._file_system.cache_clear()


@pytest.fixture
def s3_lake(s3: S3Server) -> str:
    """Where a lake can be, in a separate bucket."""
    return f"s3://{s3.make_bucket()}/history/lake"


if __name__ == "__main__":
    main()
