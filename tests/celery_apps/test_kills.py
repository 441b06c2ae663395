"""Chains and chords of a Celery project with late acks, while children, workers and brokers are killed (A2).

Nothing is lost, every chord's body is sent once, and no follow-up is doubled: what runs more than once was
running when something was killed.
"""

import os
import random
import signal
import subprocess
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.celery_apps.programs import END_S, PYTHON, ROOT, START_S, end
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
COUNT = 1000 if SOAK else 40
STEPS, PARTS, CHILDREN = 3, 4, 2
CHILD_KILLS = 60 if SOAK else 6
WORKER_KILLS = 10 if SOAK else 2
RESTARTS = 3 if SOAK else 0  # of each server; Redis then writes everything to its disk
ENDS_S = 900.0 if SOAK else 180.0
PROJECT = "tests.celery_apps.ledger"


class Ledger:
    def __init__(self, directory: Path, broker: str, results: str, ends: ExitStack) -> None:
        self._directory = directory
        self._ends = ends
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self.journal = directory / "journal"
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "UMBEL_RUN_DIR": str(directory / "run"),
            "UMBEL_LEASE_S": "2",
            "UMBEL_TASK_MAX_DELIVERIES": "50",
            "LEDGER_BROKER": broker,
            "LEDGER_RESULTS": results,
            "LEDGER_JOURNAL": str(self.journal),
        }

    def start_worker(self, name: str) -> None:
        log = self._directory / f"{name}.log"
        with log.open("ab") as file:
            options = f"-A {PROJECT} -n {name}@here -c {CHILDREN}".split()
            command = [str(PYTHON), "-m", "umbel", "worker", *options]
            worker = subprocess.Popen(
                command, env=self.environment, cwd=self._directory, stdout=file, stderr=file
            )
        self._workers[name] = worker
        self._ends.callback(end, worker)

        def is_ready() -> bool:
            assert worker.poll() is None, log.read_text()
            return f"pid={worker.pid} " in log.read_text()

        wait_until(is_ready, deadline_s=START_S, what=f"{name} to be ready")

    def kill_worker(self, name: str) -> None:
        self._workers[name].kill()
        self._workers[name].wait()

    def kill_child(self, chance: random.Random) -> bool:
        """Whether there was one to kill."""
        children = [
            process
            for worker in self._workers.values()
            for process in _children_of(worker.pid)
            if _title(process).endswith(tuple(f"child {number}" for number in range(CHILDREN)))
        ]
        if not children:
            return False
        try:
            chance.choice(children).kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def runs(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []


def _children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).rstrip()
    except psutil.Error:
        return ""


@pytest.mark.scenario
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"] if SOAK else ["redis"])
def test_chains_and_chords_survive_kills(broker: str, tmp_path: Path) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    kept = {"appendonly": "yes", "appendfsync": "always"} if RESTARTS else {}
    redis = RedisServer(tmp_path, options=kept)
    with ExitStack() as ends:
        redis.start()
        ends.callback(redis.stop)
        rabbitmq = _rabbitmq(tmp_path, ends) if broker == "rabbitmq" else None
        ledger = Ledger(tmp_path, rabbitmq.url() if rabbitmq else redis.url, redis.url, ends)
        for name in ("w1", "w2"):
            ledger.start_worker(name)
        client = subprocess.Popen(
            [PYTHON, "-m", f"{PROJECT}.client", str(COUNT), str(STEPS), str(PARTS), str(ENDS_S)],
            env=ledger.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        ends.callback(client.wait)
        ends.callback(client.kill)
        assert client.stdout is not None
        ends.callback(client.stdout.close)
        assert client.stdout.readline() == "sending\n"
        allowed = _kill_now_and_then(ledger, chance)
        assert client.stdout.readline() == "sent\n"
        allowed += _restart(ledger, redis, rabbitmq)
        states = client.stdout.readline()
        client.wait(END_S)
    assert states == f'{{"SUCCESS": {2 * COUNT}}}\n'
    _judge(ledger.runs(), allowed)


def _rabbitmq(directory: Path, ends: ExitStack) -> RabbitServer:
    """One of its own, since it is killed."""
    home = directory / "rabbitmq"
    home.mkdir()
    server = RabbitServer(home)
    server.start()
    ends.callback(server.stop)
    return server


def _restart(ledger: Ledger, redis: RedisServer, rabbitmq: RabbitServer | None) -> int:
    """The servers die in turn while the rest is done; a client that sends would not bear that."""
    for _ in range(RESTARTS):
        done = len(ledger.runs())
        redis.stop(signal.SIGKILL)
        redis.start()
        _wait_for_more(ledger, done)
        if rabbitmq is not None:
            done = len(ledger.runs())
            rabbitmq.kill()
            rabbitmq.start()
            _wait_for_more(ledger, done)
    return RESTARTS * 2 * CHILDREN * (2 if rabbitmq else 1)


def _wait_for_more(ledger: Ledger, done: int) -> None:
    if done < COUNT * (STEPS + PARTS + 1):
        _wait_for_runs(ledger, done + 1)


def _kill_now_and_then(ledger: Ledger, chance: random.Random) -> int:
    """How many tasks may have been running when something was killed."""
    whole, allowed = COUNT * (STEPS + PARTS + 1), 0
    acts = ["child"] * CHILD_KILLS + ["worker"] * WORKER_KILLS
    chance.shuffle(acts)
    for place, act in enumerate(acts):
        due = whole * (place + 1) // (2 * len(acts))
        _wait_for_runs(ledger, due)
        if act == "child":
            wait_until(lambda: ledger.kill_child(chance), what="a child to kill")
            allowed += 1
        else:
            name = chance.choice(("w1", "w2"))
            ledger.kill_worker(name)
            allowed += CHILDREN
            ledger.start_worker(name)
    return allowed


def _wait_for_runs(ledger: Ledger, count: int) -> None:
    wait_until(lambda: len(ledger.runs()) >= count, deadline_s=ENDS_S, what=f"{count} runs")


def _judge(runs: list[str], allowed: int) -> None:
    """Each place of each chain and chord ran under one id, and was repeated only if it was cut off."""
    ids: dict[tuple[str, str, str], set[str]] = {}
    for line in runs:
        kind, number, place, task_id = line.split()
        ids.setdefault((kind, number, place), set()).add(task_id)
    assert Counter(kind for kind, _, _ in ids) == {
        "step": COUNT * STEPS,
        "part": COUNT * PARTS,
        "body": COUNT,
    }
    doubled = {place: found for place, found in ids.items() if len(found) > 1}
    assert not doubled
    repeated = len(runs) - len(ids)
    print(f"{len(runs)} runs, {repeated} of them repeated, {allowed} allowed")
    assert repeated <= allowed
