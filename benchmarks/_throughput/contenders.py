"""The contenders: how each is started, and where its messages can be counted.

A drain begins when the first task runs and ends when all have run, as the tasks themselves say,
and, on Redis, when the contender's last message is acknowledged as well: that costs only those who
acknowledge after a task has run. Start-up is not part of it.
"""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks._harness import probing
from benchmarks._harness.benchmark import PEERS_PYTHON, SOURCE, clean_environment
from benchmarks._harness.processes import CPU_TICK_S, Running, answer_of, running, wait_for
from benchmarks._throughput import tally
from benchmarks._throughput.places import CHILDREN, CONFIRM_VARIABLE, HOME_VARIABLE, TALLY, URL_VARIABLE
from benchmarks._throughput.servers import RABBITMQ, REDIS, Server

CLIENT_TIMEOUT_S = 120.0
OUR_PYTHON = Path(sys.executable)
NOWHERE = "redis://127.0.0.1:1/0"  # a client that only describes itself connects to nothing


@dataclass(frozen=True, slots=True)
class Fill:
    each_per_s: float
    each_cpu_us: float  # of the client, per task
    bulk_per_s: float
    bulk_cpu_us: float
    threads_per_s: float | None = None
    threads_cpu_us: float | None = None
    awaited_per_s: float | None = None
    awaited_cpu_us: float | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    tasks_per_s: float
    cpu_us: float  # of the worker and its children, per task
    server_cpu_us: float  # of the broker, per task
    first_task_ms: float  # from the start of the worker's process


@dataclass(frozen=True)
class Contender:
    name: str
    module: str
    worker: str  # the command line, as a reader would type it in that environment
    shares: Mapping[str, float]  # by server: of the tasks, so that each takes about as long as the others
    counted_by: str  # a Lua script: how many messages it has in Redis, its own or a worker's
    queue: str = ""  # in RabbitMQ
    variables: Mapping[str, str] = field(default_factory=dict)
    source: Path = SOURCE  # of our package
    python: Path = PEERS_PYTHON
    stop_signal: signal.Signals = signal.SIGTERM
    stop_family: bool = False  # its main process does not pass the signal on
    sends_at_once: bool = False  # from threads as well, and awaited where it can be
    drains_only: bool = False  # the rest would not differ from the contender that it is a variant of

    def at_commit(self, name: str, source: Path) -> "Contender":
        return replace(self, name=name, source=source)

    @property
    def is_peer(self) -> bool:
        return self.python == PEERS_PYTHON

    def settings(self, home: Path) -> Mapping[str, str]:
        variables = "".join(f"{name}={value} " for name, value in self.variables.items())
        return {**self._ask(home, NOWHERE, "describe"), "worker": f"{variables}{self.worker}"}

    def fill(self, home: Path, url: str, count: int, *, each: int, at_once: int = 0) -> Fill:
        """`each`: one at a time; `at_once`: from threads, and as many awaited; the rest in bulk."""
        return Fill(**self._ask(home, url, "fill", str(count), str(each), str(at_once)))

    def probe(self, home: Path, url: str, count: int) -> Mapping[str, float]:
        """Median times in milliseconds from sending a task to an idle worker until it runs."""
        probing.prepare(home)
        asked = self._ask(home, url, "probe", str(count))
        parts = {"latency": "p50_ms", "latency_client": "client_p50_ms", "latency_worker": "worker_p50_ms"}
        return {name: float(asked[of_client]) for name, of_client in parts.items()}

    @contextmanager
    def draining(self, home: Path, url: str, server: Server, count: int) -> Iterator[tuple[Running, Drain]]:
        """A worker started on a full queue; the block begins when the queue is empty."""
        wait_for(lambda: self.waiting(server, url) == count, f"see {count:,} messages of {self.name}")
        began_ns = time.monotonic_ns()
        with self.working(home, url) as worker:
            yield worker, self._watch(home, url, worker, server, began_ns, count)

    def waiting(self, server: Server, url: str) -> int:
        return server.waiting(url, script=self.counted_by, queue=self.queue)

    def _watch(
        self, home: Path, url: str, worker: Running, server: Server, began_ns: int, count: int
    ) -> Drain:
        tasks = home / TALLY
        wait_for(lambda: tally.read(tasks).tasks > 0, "run its first task", worker)
        cpu_s, server_cpu_s = worker.cpu_s(), server.cpu_s()
        wait_for(lambda: tally.read(tasks).tasks >= count, f"run {count:,} tasks", worker)
        ended_ns = 0
        if server.shows_unacknowledged:
            wait_for(lambda: self.waiting(server, url) == 0, "empty its queue", worker)
            ended_ns = time.monotonic_ns()
        # A short drain may use less than the kernel's clock can tell.
        cpu_s, server_cpu_s = (
            max(now_s - before_s, CPU_TICK_S)
            for now_s, before_s in ((worker.cpu_s(), cpu_s), (server.cpu_s(), server_cpu_s))
        )
        ran = tally.read(tasks)
        if ran.tasks != count:
            raise worker.failed(f"ran {ran.tasks:,} tasks instead of {count:,}")
        return Drain(
            tasks_per_s=count / (max(ended_ns, ran.last_ns) - ran.first_ns) * 1e9,
            cpu_us=cpu_s / count * 1e6,
            server_cpu_us=server_cpu_s / count * 1e6,
            first_task_ms=(ran.first_ns - began_ns) / 1e6,
        )

    def _ask(self, home: Path, url: str, *arguments: str) -> dict[str, Any]:
        return self.ask_client("benchmarks._throughput.client", home, url, *arguments)

    def ask_client(self, client: str, home: Path, url: str, *arguments: str) -> dict[str, Any]:
        """What a client module of a benchmark answers when it is run with this contender's side."""
        answer: dict[str, Any] = answer_of(
            f"{self.name}-client",
            [self.python, "-m", client, self.module, *arguments],
            environment=self._environment(home, url),
            directory=home,
            timeout_s=CLIENT_TIMEOUT_S,
        )
        return answer

    @contextmanager
    def working(self, home: Path, url: str, *arguments: str) -> Iterator[Running]:
        """A worker for as long as the block lasts, with these arguments more."""
        command, *own = self.worker.split()
        with running(
            f"{self.name}-worker",
            [self.python.parent / command, *own, *arguments],
            environment=self._environment(home, url),
            directory=home,
            stop_signal=self.stop_signal,
            stop_family=self.stop_family,
        ) as worker:
            yield worker

    def _environment(self, home: Path, url: str) -> dict[str, str]:
        told: dict[str, str | Path] = {
            HOME_VARIABLE: home,
            URL_VARIABLE: url,
            "RQ_REDIS_URL": url,
            "UMBEL_RUN_DIR": home / "run",
        }
        return clean_environment(source=self.source, **told, **self.variables)


_SIDES = "benchmarks._throughput"
# What an owner holds is in a hash with one field more, its epoch.
_UMBELS = """
local count = redis.call('LLEN', 'celery')
for _, key in ipairs(redis.call('KEYS', 'umbel.inflight.*')) do
  count = count + redis.call('HLEN', key) - redis.call('HEXISTS', key, 'epoch')
end
return count
"""
_CELERYS = "return redis.call('LLEN', 'celery') + redis.call('HLEN', 'unacked')"

_UMBEL_WORKER = f"umbel worker -A {_SIDES}.umbel_side:app -c {CHILDREN} -l warning"
_CELERY_WORKER = (
    f"celery -A {_SIDES}.celery_side worker -c {CHILDREN} -l warning --without-gossip --without-mingle"
)

UMBEL = Contender(
    name="umbel",
    python=OUR_PYTHON,
    module=f"{_SIDES}.umbel_side",
    worker=_UMBEL_WORKER,
    shares={REDIS.name: 1.0, RABBITMQ.name: 0.3},
    counted_by=_UMBELS,
    queue="celery",
    sends_at_once=True,
)
UMBEL_EVENTS = Contender(
    name="umbel_events",
    python=OUR_PYTHON,
    module=UMBEL.module,
    worker=f"{_UMBEL_WORKER} -E",
    shares={REDIS.name: 0.6},
    counted_by=_UMBELS,
    drains_only=True,
)
UMBEL_SIGNED = replace(
    UMBEL,
    name="umbel_signed",
    shares={REDIS.name: 0.6, RABBITMQ.name: 0.1},
    variables={"UMBEL_SIGNING_KEYS": "bench:thirty-two characters of secret"},
    sends_at_once=False,
)
CELERY = Contender(
    name="celery",
    module=f"{_SIDES}.celery_side",
    worker=_CELERY_WORKER,
    shares={REDIS.name: 0.025, RABBITMQ.name: 0.05},
    counted_by=_CELERYS,
    queue="celery",
)
CELERY_EVENTS = Contender(
    name="celery_events",
    module=CELERY.module,
    worker=f"{_CELERY_WORKER} -E",
    shares={REDIS.name: 0.015},
    counted_by=_CELERYS,
    drains_only=True,
)
DRAMATIQ = Contender(
    name="dramatiq",
    module=f"{_SIDES}.dramatiq_side",
    worker=f"dramatiq {_SIDES}.dramatiq_side -p {CHILDREN}",
    shares={REDIS.name: 0.1, RABBITMQ.name: 0.1},
    counted_by="return redis.call('HLEN', 'dramatiq:default.msgs')",
    variables={"dramatiq_queue_prefetch": "100"},
    queue="default",
    sends_at_once=True,
)
DRAMATIQ_CONFIRMED = replace(
    DRAMATIQ,
    name="dramatiq_confirmed",
    shares={RABBITMQ.name: 0.02},
    variables={**DRAMATIQ.variables, CONFIRM_VARIABLE: "1"},
)
TASKIQ = Contender(
    name="taskiq",
    module=f"{_SIDES}.taskiq_side",
    worker=f"taskiq worker {_SIDES}.taskiq_side:broker -w {CHILDREN} --log-level WARNING",
    shares={REDIS.name: 0.08},
    counted_by="return redis.call('LLEN', 'taskiq')",
)
HUEY = Contender(
    name="huey",
    module=f"{_SIDES}.huey_side",
    worker=f"huey_consumer {_SIDES}.huey_side.huey -k process -w {CHILDREN} -q -n",
    shares={REDIS.name: 0.15},
    counted_by="return redis.call('LLEN', 'huey.redis.bench')",
    stop_signal=signal.SIGINT,
)
RQ = Contender(
    name="rq",
    module=f"{_SIDES}.rq_side",
    worker=f"rq worker-pool -n {CHILDREN} -w rq.worker.SimpleWorker -q -l ERROR",
    shares={REDIS.name: 0.015},
    counted_by="return redis.call('LLEN', 'rq:queue:default') + redis.call('ZCARD', 'rq:wip:default')",
)
SAQ = Contender(
    name="saq",
    module=f"{_SIDES}.saq_side",
    worker=f"saq {_SIDES}.saq_side.settings --workers {CHILDREN}",
    shares={REDIS.name: 0.06},
    counted_by="return redis.call('ZCARD', 'saq:default:incomplete')",
    stop_family=True,
)
