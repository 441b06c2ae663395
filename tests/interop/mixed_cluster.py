"""MixedCluster: workers and clients of Umbel and of Celery on one broker, all real processes.

Each kind of worker has a queue that only it consumes (`on_umbel`, `on_celery`, `on_celery55`), so a
test can say where a task runs, and there is one that all consume (`on_either`). A question to a
client is an expression (client.py); what it raises there is raised here as `Raised`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster import Cluster
from tests.waiting import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TASKS_FILE = HERE / "shared_tasks.py"
STOP_S = 20.0
QUEUES = {name: name for name in ("on_umbel", "on_celery", "on_celery55", "on_either")}
ENVIRONMENTS = {"celery": ROOT / ".venv-celery", "celery55": ROOT / ".venv-celery55"}


class Raised(Exception):
    """What an expression raised in a client; a class that was made up for it is not known."""

    def __init__(self, kind: str, module: str, args: list[Any], text: str, is_known: bool) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.module = module
        self.given = args
        self.is_known = is_known


class Process:
    """A process that ends with its block; its output is in a file."""

    def __init__(self, name: str, command: Sequence[str], home: Path, **variables: str) -> None:
        self.name = name
        self._told = False
        self.log_file = home / f"{name}.log"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("UMBEL_", "CELERY_"))}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=home,
                env={**kept, "PYTHONPATH": str(HERE), **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if name.endswith("client") else log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def check(self) -> None:
        assert self._process.poll() is None, f"{self.name} ended: {self.log}"

    def tell_to_stop(self) -> None:
        if not self._told:  # a second time would mean "at once"
            self._told = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self.tell_to_stop()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class Client(Process):
    """`client("get(add.delay(2, 3))")` is what the expression gives in a client of its library."""

    def __init__(self, library: str, python: Path, home: Path, **variables: str) -> None:
        super().__init__(f"{library}-client", [str(python), str(HERE / "client.py")], home, **variables)
        self.library = library
        self._asked = 0

    def __call__(self, expression: str, **names: Any) -> Any:
        __tracebackhide__ = True
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asked += 1
        question = {"number": self._asked, "expression": expression, "names": QUEUES | names}
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = {"number": 0}
        while answer["number"] != self._asked:  # an answer that a test did not wait for is passed over
            line = self._process.stdout.readline()
            assert line, f"the {self.name} ended: {self.log}"
            answer = json.loads(line)
        if "raised" in answer:
            described: Any = answer["raised"]
            raise Raised(**described)
        return answer["value"]


class CeleryWorker(Process):
    def __init__(
        self,
        version: str,
        home: Path,
        *,
        queues: Sequence[str],
        name: str = "",
        level: str = "INFO",
        events: str = "-E",
        **variables: str,
    ) -> None:
        # One child: then tasks run in the order in which they were taken.
        flags = [
            "-n",
            f"{name or version}@%h",
            "-Q",
            ",".join(queues),
            "-P",
            "prefork",
            "-c",
            "1",
            *events.split(),
            "-l",
            level,
        ]
        command = [str(program_of(version, "celery")), "-A", "shared_tasks", "worker", *flags]
        super().__init__(f"{name or version}-worker", command, home, **variables)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            self.check()
            return " ready." in self.log

        wait_until(is_ready, what=f"{self.name} to be ready")


class MixedCluster:
    """`versions` are the Celery workers that take part: celery (5.7), celery55. `events`: they send them."""

    def __init__(
        self,
        home: Path,
        name: str,
        *,
        broker: str,
        backend: str,
        versions: Sequence[str],
        events: bool = True,
    ) -> None:
        self.home = home
        self.name = name
        self.broker, self.backend = broker, backend
        self._versions = versions
        self._events = events
        self._ends = ExitStack()
        self.ours: Cluster
        self.clients: dict[str, Client] = {}
        self.workers: dict[str, CeleryWorker] = {}

    def client(self, library: str) -> Client:
        """A client is started when it is first needed."""
        if library not in self.clients:
            if library == "umbel":
                variables = {"UMBEL_BROKER": self.broker, "UMBEL_BACKEND": self.backend}
                variables["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT / "src")])
                client = Client(library, Path(sys.executable), self.home, **variables)
            else:
                client = Client(
                    library, program_of(library, "python"), self.home, **self.variables_for_celery()
                )
            self.clients[library] = self._ends.enter_context(client)
        return self.clients[library]

    def revoked_at(self, name: str) -> list[str]:
        """What one of our workers tells a Celery worker that starts."""
        asked = "app.control.inspect(timeout=5.0, limit=1, destination=[node]).hello('asker@test', [])"
        (said,) = self.client("celery")(asked, node=f"{name}@{socket.gethostname()}").values()
        found: list[str] = said["revoked"]
        return found

    def __enter__(self) -> Self:
        (self.home / "spans").mkdir()
        with ExitStack() as ends:
            for version in self._versions:  # they take seconds: all start at once
                worker = CeleryWorker(
                    version,
                    self.home,
                    queues=[f"on_{version}", "on_either"],
                    events="-E" if self._events else "",
                    **self.variables_for_celery(),
                )
                self.workers[version] = ends.enter_context(worker)
            ours = Cluster(self.home, TASKS_FILE, broker=self.broker, backend=self.backend)
            self.ours = ends.enter_context(ours)
            self.ours.start_worker("umbel", "-c", "2", "-Q", "on_umbel,on_either", "-E")
            for worker in self.workers.values():
                worker.wait_until_ready()
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in (*self.workers.values(), *self.clients.values()):
            process.tell_to_stop()
        self._ends.close()

    def variables_for_celery(self) -> dict[str, str]:
        return {"CELERY_BROKER_URL": self.broker, "CELERY_RESULT_BACKEND": self.backend}


def program_of(version: str, name: str) -> Path:
    program = ENVIRONMENTS[version] / "bin" / name
    assert program.exists(), (
        f"{program} is missing: `make test` makes it, or `scripts/setup interop` by itself"
    )
    return program
