"""Workers of Umbel and of Celery share a queue on Redis, and both are killed: whose is what never ran?

A tap on each worker's connection notes which messages it was handed, and which it wrote to Redis. So for
each message that never ran it is known which worker had it last. With late acks Umbel's must lose none.
Celery's lose some, also where no worker of Umbel is there (the control): it takes a message from the list
by one command (BRPOP), and writes it among the unacknowledged by another. A kill in between loses it. With
early acks, Celery's default, a kill also loses what is acknowledged and has not started, in both.
"""

import os
import random
import re
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.celery_apps.programs import PYTHON, ROOT
from tests.servers.redis import RedisServer, exchange
from tests.servers.way import Way
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
COUNT, KILLS = (20_000, 60) if SOAK else (300, 4)
RESTORED_AFTER_S, LEASE_S = 3, 2
WAIT_S = 900.0 if SOAK else 90.0
QUEUE = b"celery"
UMBEL, POPPED, UNACKED = "umbel", "celery, only popped", "celery, unacknowledged"
NUMBER = re.compile(rb"mixed-\d{6}")
OVERLAP = 12  # bytes of a number that may end in the next piece


def kind_of(worker: str) -> str:
    return worker.partition("-")[0]


@dataclass
class Tap:
    """What passed between a worker and the server, by the numbers of the messages in it."""

    asks: bool = False  # it waits for messages, or takes them
    handed: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    _rest: dict[bool, bytes] = field(default_factory=lambda: defaultdict(bytes))

    def watch(self, data: bytes, is_sent: bool) -> None:
        self.asks |= is_sent and (b"BRPOP" in data or b"umbel.handed" in data)
        text = self._rest[is_sent] + data
        (self.written if is_sent else self.handed).update(found.decode() for found in NUMBER.findall(text))
        self._rest[is_sent] = text[-OVERLAP:]


class Fleet:
    """Workers on one queue, each by a tapped way to the server; one that is killed is replaced."""

    def __init__(self, home: Path, server: RedisServer, kinds: Sequence[str], *, late: bool) -> None:
        self.taps: dict[str, Tap] = {}
        self.kills: Counter[str] = Counter()
        self._home, self._server, self._late = home, server, late
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._ways: list[Way] = []
        for kind in kinds:
            self._start(kind)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: all(self.taps[name].asks for name, _ in self._running), what="all workers to be ready"
        )

    def kill_any(self, chance: random.Random) -> None:
        name, process = self._running.pop(chance.randrange(len(self._running)))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.kills[kind_of(name)] += 1
        self._start(kind_of(name))

    def close(self) -> None:
        while self._running:
            _, process = self._running.pop()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for way in self._ways:  # not before: they see what the server still gives to a worker that is dead
            way.end()

    def last_holder(self, number: str) -> str:
        """The kind of worker that was handed it last; of Celery's, whether that wrote it to the server."""
        for name in reversed(self.taps):
            if number in self.taps[name].handed:
                was_written = number in self.taps[name].written
                return {"umbel": UMBEL, "celery": UNACKED if was_written else POPPED}[kind_of(name)]
        return "nobody"

    def _start(self, kind: str) -> None:
        name = f"{kind}-{len(self.taps)}"
        tap = self.taps[name] = Tap()
        way = Way(self._server.port, watch=tap.watch)
        worker = ["worker", "-n", f"{name}@mixed", "-c", "1", "-l", "warning"]
        app = ["-A", "tests.interop.mixed_kills_tasks"]
        command = ["umbel", *worker, *app] if kind == "umbel" else ["celery", *app, *worker]
        with (self._home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [PYTHON, "-m", *command],
                env=self._environment(name, f"redis://127.0.0.1:{way.port}/0"),
                cwd=self._home,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self._running.append((name, process))
        self._ways.append(way)

    def _environment(self, name: str, url: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "UMBEL_RUN_DIR": str(self._home / "run"),
            "UMBEL_LEASE_S": str(LEASE_S),
            "UMBEL_TASK_MAX_DELIVERIES": "50",
            "MIXED_BROKER": url,
            "MIXED_RESTORED_AFTER_S": str(RESTORED_AFTER_S),
            "MIXED_ACKS_LATE": "yes" if self._late else "",
            "MIXED_LEDGER": str(self._home / "ledger"),
            "MIXED_WORKER": name,
        }


@contextmanager
def a_fleet(home: Path, kinds: Sequence[str], *, late: bool) -> Iterator[tuple[Fleet, RedisServer]]:
    home.mkdir()
    server = RedisServer(home)
    server.start()
    fleet = Fleet(home, server, kinds, late=late)
    try:
        yield fleet, server
    finally:
        fleet.close()
        server.stop()


def run_under_kills(
    home: Path, kinds: Sequence[str], *, late: bool, seed: int
) -> tuple[Counter[str], Counter[str]]:
    """Who had the messages last that never ran, and how many workers of each kind were killed."""
    chance = random.Random(seed)
    numbers = [f"mixed-{number:06}" for number in range(COUNT)]
    with a_fleet(home, kinds, late=late) as (fleet, server):
        ledger = home / "ledger"

        def ran() -> set[str]:
            lines = ledger.read_text().splitlines() if ledger.exists() else []
            return {line.split()[0] for line in lines}

        for kill in range(KILLS + 1):
            first, end = COUNT * kill // (KILLS + 1), COUNT * (kill + 1) // (KILLS + 1)
            _send(home, server, numbers[first:end])
            half = (first + end) // 2 - len(numbers) // 10
            wait_until(
                lambda half=half: len(ran()) >= half or not _waiting(server),  # type: ignore[misc]
                deadline_s=WAIT_S,
                what="half of what was sent to run",
            )
            if kill < KILLS:
                fleet.kill_any(chance)
                fleet.wait_until_ready()
        wait_until(
            lambda: not _waiting(server) or len(ran()) == COUNT, deadline_s=WAIT_S, what="an empty queue"
        )
        fleet.close()
        runs = Counter(kind_of(line.split()[1]) for line in ledger.read_text().splitlines())
        print(f"ran by {dict(runs)}, {runs.total() - len(ran())} of them again; killed {dict(fleet.kills)}")
        return Counter(map(fleet.last_holder, set(numbers) - ran())), fleet.kills


def _send(home: Path, server: RedisServer, numbers: Sequence[str]) -> None:
    program = (
        "import sys; from tests.interop.mixed_kills_tasks import run\n"
        "for number in sys.stdin.read().split(): run.delay(number)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "MIXED_BROKER": server.url,
        "MIXED_ACKS_LATE": "",
        "MIXED_LEDGER": "",
    }
    subprocess.run(
        [PYTHON, "-c", program], input=" ".join(numbers), env=environment, cwd=home, text=True, check=True
    )


def _waiting(server: RedisServer) -> int:
    """Messages that wait, or that a worker holds, of either kind."""
    keys = server.ask("KEYS", "*")
    assert isinstance(keys, list)
    lists = [key for key in keys if key.partition(b"\x06")[0] == QUEUE or key.startswith(b"umbel.handed.")]
    hashes = [key for key in keys if key == b"unacked" or key.startswith(b"umbel.inflight.")]
    asked = [*(("LLEN", key) for key in lists), *(("HKEYS", key) for key in hashes)]
    answers = exchange(server.port, asked) if asked else []
    counts = (len(set(one) - {b"epoch"}) if isinstance(one, list) else one for one in answers)
    return sum(count for count in counts if isinstance(count, int))


@pytest.mark.scenario
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("acks", ["late", "early"])
def test_what_never_runs_beside_celery_was_celerys(acks: str, tmp_path: Path) -> None:
    seed, late = random.randrange(2**32), acks == "late"
    print(f"seed {seed}")
    kinds = ["umbel", "celery", "umbel", "celery"]
    lost, kills = run_under_kills(tmp_path / "mixed", kinds, late=late, seed=seed)
    print(f"mixed, acks {acks}: {dict(lost)} of {COUNT}")
    if SOAK:
        alone, _ = run_under_kills(tmp_path / "alone", ["celery"] * 4, late=late, seed=seed)
        print(f"celery alone, acks {acks}: {dict(alone)} of {COUNT}")
    allowed = {POPPED} if late else {POPPED, UNACKED, UMBEL}
    assert lost.keys() <= allowed, dict(lost)
    assert lost[UMBEL] <= kills[UMBEL], "one child was about to start one task"
