"""The sections of the benchmark: what each lets one contender do, and what it measures.

Each begins with an empty Redis and directory for every size. What a worker and the server used is counted in
seconds of the processor, so that it hardly depends on what else the machine does.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks._harness.measures import Measure
from benchmarks._harness.processes import CPU_TICK_S, Running, wait_for
from benchmarks._throughput import tally
from benchmarks._throughput.contenders import CELERY, HUEY, UMBEL, Contender
from benchmarks._throughput.places import CHILDREN, TALLY
from benchmarks._throughput.servers import REDIS

CLIENT = "benchmarks._growth.client"
COST = "µs/task"
LOAD_S = 4.0  # how long a trickle lasts
IDLE_S = 5.0
SETTLED_S = 3.0  # after its start a worker looks around; then it is idle
PROBES = 20
WORKFLOWS = {"chain": (10, 100, 1000), "group": (10, 100, 1000), "chord": (10, 100, 1000)}

Section = Callable[[Contender, Path, int], Mapping[str, float]]


def counts(most: int, tasks: int, sizes: Sequence[int]) -> list[int]:
    """The sizes up to what `--tasks` allows, and always the first."""
    return [size for size in sizes if size * most <= tasks] or [sizes[0]]


class _Used:
    """What a worker and the server have used since this was made, for each of so many tasks."""

    def __init__(self, *workers: Running) -> None:
        self._workers = workers
        self._began = self._seconds()

    def of_each(self, prefix: str, tasks: int) -> dict[str, float]:
        worker_s, server_s = self._seconds()
        used_s, server_used_s = worker_s - self._began[0], server_s - self._began[1]
        return {
            f"{prefix}_cpu": max(used_s, CPU_TICK_S) / tasks * 1e6,
            f"{prefix}_server_cpu": max(server_used_s, CPU_TICK_S) / tasks * 1e6,
        }

    def _seconds(self) -> tuple[float, float]:
        return sum(worker.cpu_s() for worker in self._workers), REDIS.cpu_s()


def _empty(home: Path, name: object) -> tuple[Path, str]:
    place = home / str(name)
    place.mkdir()
    return place, REDIS.empty_url()


def _ran(home: Path) -> int:
    return tally.read(home / TALLY).tasks


def _wait_until_ran(home: Path, least: int, worker: Running) -> None:
    wait_for(lambda: _ran(home) >= least, f"run {least:,} tasks", worker)


PAYLOADS = {100: 1.0, 10_000: 0.3, 1_000_000: 0.01}  # and of the tasks, how many


def payload(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for size, share in PAYLOADS.items():
        place, url = _empty(home, size)
        count = max(10, round(tasks * share * max(contender.shares[REDIS.name], 0.05 if share < 1 else 0)))
        sent = contender.ask_client(CLIENT, place, url, "payload", str(size), str(count))
        with contender.draining(place, url, REDIS, count) as (_worker, drain):
            found |= {
                f"payload_{size}": drain.tasks_per_s,
                f"payload_{size}_cpu": drain.cpu_us,
                f"payload_{size}_server_cpu": drain.server_cpu_us,
                f"payload_{size}_send_cpu": sent["cpu_us"],
            }
    return found


QUEUES = (1, 10, 100, 1000)


def queues(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    """How long a task takes to start when the worker consumes so many queues."""
    if contender.name.partition("@")[0] not in (UMBEL.name, CELERY.name):
        return {}
    found: dict[str, float] = {}
    for number in counts(10, tasks, QUEUES):
        place, url = _empty(home, number)
        names = ",".join(["celery", *(f"q{one}" for one in range(1, number))])
        with contender.working(place, url, "-Q", names):
            found[f"queues_{number}"] = contender.probe(place, url, PROBES)["latency"]
    return found


BACKLOGS = (10_000, 100_000, 1_000_000)
PEERS_BACKLOG = 100_000  # who sends a thousand a second needs a quarter of an hour for the largest
OF_A_BACKLOG = 5000  # tasks that are run of it


def backlog(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    """What a task costs with so many waiting."""
    found: dict[str, float] = {}
    is_ours = contender.name.partition("@")[0] == UMBEL.name
    most = min(tasks * 20, max(BACKLOGS) if is_ours else PEERS_BACKLOG)
    for waiting in [size for size in BACKLOGS if size <= most] or [tasks]:
        place, url = _empty(home, waiting)
        contender.fill(place, url, waiting, each=10)
        count = min(waiting, max(10, round(OF_A_BACKLOG * contender.shares[REDIS.name])))
        with contender.working(place, url) as worker:
            _wait_until_ran(place, 1, worker)
            used, before = _Used(worker), _ran(place)
            _wait_until_ran(place, min(waiting, before + count), worker)
            found |= used.of_each(f"backlog_{waiting}", max(1, _ran(place) - before))
    return found


WORKERS = (1, 4, 32)


def workers(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    """What a task costs when so many workers of one child drain one queue."""
    if contender.name.partition("@")[0] not in (UMBEL.name, CELERY.name, HUEY.name):
        return {}
    alone = replace(
        contender,
        worker=contender.worker.replace(f"-c {CHILDREN}", "-c 1").replace(f"-w {CHILDREN}", "-w 1"),
    )
    found: dict[str, float] = {}
    for number in counts(500, tasks, WORKERS):
        place, url = _empty(home, number)
        count = max(10, round(tasks * contender.shares[REDIS.name] / 2))
        contender.fill(place, url, count, each=10)
        with ExitStack() as stack:
            named = ("-n", "{0}@bench") if contender is not HUEY and "-A" in contender.worker else ()
            started = [
                stack.enter_context(alone.working(place, url, *(part.format(f"w{one}") for part in named)))
                for one in range(number)
            ]
            _wait_until_ran(place, 1, started[0])
            used = _Used(*started)
            _wait_until_ran(place, count, started[0])
            ran = tally.read(place / TALLY)
            found[f"workers_{number}"] = ran.tasks / max(1, ran.last_ns - ran.first_ns) * 1e9
            found |= used.of_each(f"workers_{number}", count)
    return found


def workflows(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    """How long each step or part of a chain, a group and a chord takes, until the result is here."""
    side = {UMBEL.name: "umbel_side", CELERY.name: "celery_side"}.get(contender.name.partition("@")[0])
    if side is None:
        return {}
    module = f"benchmarks._growth.{side}"
    with_results = replace(
        contender, module=module, worker=contender.worker.replace(contender.module, module)
    )
    found: dict[str, float] = {}
    for kind, sizes in WORKFLOWS.items():
        for size in counts(10, tasks, sizes):
            place, url = _empty(home, f"{kind}-{size}")
            with with_results.working(place, url) as worker:
                with_results.ask_client(CLIENT, place, url, "workflow", kind, "2")  # until it has started
                used = _Used(worker)
                sent = with_results.ask_client(CLIENT, place, url, "workflow", kind, str(size))
                found[f"{kind}_{size}"] = sent["step_us"]
                found[f"{kind}_{size}_cpu"] = used.of_each("", size)["_cpu"]
    return found


PACES = (50, 400)


def trickle(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    """What a task costs when tasks come one at a time to a worker that is idle between them."""
    found: dict[str, float] = {}
    for per_s in PACES:
        place, url = _empty(home, per_s)
        count = round(min(LOAD_S * per_s, max(10, tasks)))
        with contender.working(place, url) as worker:
            contender.ask_client(CLIENT, place, url, "trickle", str(per_s), "10")
            _wait_until_ran(place, 10, worker)
            time.sleep(min(SETTLED_S, tasks / 1000))
            used = _Used(worker)
            contender.ask_client(CLIENT, place, url, "trickle", str(per_s), str(count))
            _wait_until_ran(place, 10 + count, worker)
            found |= used.of_each(f"trickle_{per_s}", count)
    return found


def idle(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    """The commands that a worker sends while there is nothing to do, those inside of scripts among them."""
    place, url = _empty(home, "idle")
    with contender.working(place, url) as worker:
        contender.ask_client(CLIENT, place, url, "trickle", "10", "2")
        _wait_until_ran(place, 2, worker)
        time.sleep(min(SETTLED_S, tasks / 1000))
        seen_s, rates = min(IDLE_S, max(0.2, tasks / 1000)), list[float]()
        for _ in range(2):
            before, began = REDIS.commands(), time.monotonic()
            time.sleep(seen_s)
            rates.append((REDIS.commands() - before - 1) / (time.monotonic() - began))
    return {"idle": fmean(rates)}


def measures() -> Iterator[Measure]:
    for size in PAYLOADS:
        yield Measure(f"payload_{size}", f"payload of {size:,} bytes: drain", "tasks/s")
        yield from _costs(f"payload_{size}", f"payload of {size:,} bytes")
        yield Measure(
            f"payload_{size}_send_cpu", f"payload of {size:,} bytes: CPU of the client", COST, False
        )
    for number in QUEUES:
        yield Measure(f"queues_{number}", f"{number:,} queues: sent until it runs, p50", "ms", False)
    for waiting in BACKLOGS:
        yield from _costs(f"backlog_{waiting}", f"{waiting:,} waiting")
    for number in WORKERS:
        yield Measure(f"workers_{number}", f"{number} workers: drain", "tasks/s")
        yield from _costs(f"workers_{number}", f"{number} workers")
    for kind, sizes in WORKFLOWS.items():
        for size in sizes:
            yield Measure(f"{kind}_{size}", f"{kind} of {size:,}: each", "µs", False)
            yield Measure(f"{kind}_{size}_cpu", f"{kind} of {size:,}: CPU of the worker", COST, False)
    for per_s in PACES:
        yield from _costs(f"trickle_{per_s}", f"{per_s} tasks a second")
    yield Measure("idle", "idle: commands on Redis", "1/s", False)


def _costs(name: str, title: str) -> Iterator[Measure]:
    yield Measure(f"{name}_cpu", f"{title}: CPU of the worker", COST, False)
    yield Measure(f"{name}_server_cpu", f"{title}: CPU of Redis", COST, False)


SECTIONS: Mapping[str, Section] = {
    "payload": payload,
    "queues": queues,
    "backlog": backlog,
    "workers": workers,
    "workflows": workflows,
    "trickle": trickle,
    "idle": idle,
}
