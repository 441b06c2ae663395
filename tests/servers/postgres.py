"""A private PostgreSQL server: on a free port of the loopback, in a directory of its own.

Making its files takes a second or two, so one serves all tests of a run and every test gets a database
of its own. Tests that stop or restart a server start one of their own with `PostgresServer`.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.servers.ports import free_port
from tests.servers.shared import ends_with_run, once
from tests.waiting import wait_until

DEBIAN = Path("/usr/lib/postgresql")  # a folder for each version
USER = "umbel"  # anybody who reaches the port is let in under this name
SYSTEM_USER = "postgres"  # PostgreSQL refuses to run as root

# Nothing here outlives the tests, so nothing waits for the disk. Connections are counted by tests: no others.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
}


@dataclass
class PostgresServer:
    """Start with `start()`. `options` are those of postgresql.conf."""

    directory: Path
    port: int = field(default_factory=free_port)
    options: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of a database that nobody has used."""
        name = f"t{uuid4().hex[:12]}"
        self.ask(f"CREATE DATABASE {name}")
        return self.url(name)

    def ask(self, query: str) -> list[tuple[object, ...]]:
        """The rows of one statement, by a connection of its own outside any transaction."""
        return ask_postgres(self.url(), query)

    def start(self) -> None:
        if not (self.directory / "data").exists():
            self._make_files()
        given = {"port": str(self.port), **SETTINGS, **self.options}
        settings = [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
        self._process = self._run("postgres", ["-D", str(self.directory / "data"), *settings])
        ends_with_run(self._process, self.directory, "INT")
        wait_until(self._answers, what=f"PostgreSQL on port {self.port}")

    def stop(self, sign: signal.Signals = signal.SIGINT) -> None:
        """SIGINT closes what is connected and ends in order; SIGQUIT is like a loss of power."""
        if self._process is not None:
            self._process.send_signal(sign)
            self._process.wait(30)
            self._process = None

    def _make_files(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.directory, SYSTEM_USER, SYSTEM_USER)
        words = [
            "-D",
            str(self.directory / "data"),
            "-U",
            USER,
            "--auth=trust",
            "--no-sync",
            "--locale=C.UTF-8",
        ]
        assert self._run("initdb", words).wait(120) == 0, self._log.read_text()

    def _run(self, program: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [str(_programs() / program), *words]
        user = SYSTEM_USER if os.geteuid() == 0 else None
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.directory,
                stdout=log,
                stderr=log,
                user=user,
                group=user,
                extra_groups=[] if user else None,
                process_group=0,
            )

    @property
    def _log(self) -> Path:
        return self.directory / "postgres.log"

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        try:
            return bool(self.ask("SELECT 1"))
        except psycopg.OperationalError:
            return False


def ask_postgres(url: str, query: str) -> list[tuple[object, ...]]:
    """The same where only the address is known."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


def _programs() -> Path:
    found = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    assert found, "PostgreSQL is missing: apt-get install postgresql"
    return found[-1].parent


@cache
def shared_postgres() -> PostgresServer:
    """The server of this run, which tests do not stop."""
    found = once("postgres", _start_for_run)
    return PostgresServer(Path(found["directory"]), found["port"])


def _start_for_run(directory: Path) -> dict[str, Any]:
    server = PostgresServer(directory)
    server.start()
    return {"directory": str(directory), "port": server.port}


@pytest.fixture
def postgres_url() -> str:
    """An empty database, at an address as psycopg takes it."""
    return shared_postgres().new_database()
