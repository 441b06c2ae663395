"""Field: five workers in namespaces, what is asked of them, and what an observer beside the broker sees."""

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import Cluster
from tests.partitions.replay import Sample
from tests.partitions.schedule import Disturbance, changes
from tests.servers.network import Network, network
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel import chain, chord
from umbel.app.results import AsyncResult
from umbel.brokers.interface import Broker
from umbel.brokers.registry import open_broker
from umbel.clock import boot_time_s
from umbel.errors import BrokerError
from umbel.protocol.delivery.states import READY_STATES
from umbel.protocol.leadership.coordination import NAMESPACE, ElectionRecord, Policy, election_key
from umbel.sim.plan import Ask

ROOT = Path(__file__).resolve().parents[2]
TASKS_FILE = Path(__file__).with_name("partition_work.py")
WORKERS = ("w1", "w2", "w3", "w4", "w5")
FLAGS = ("-c", "2", "-P", "threads", "-l", "INFO")
LEASE_S = 4.0  # of claimed messages
SCHEDULER_LEASE_S = 6.0
LEASES = ("scheduler", "coord-sweeper")
SAMPLE_S = 0.1
SAMPLES_MAX = 100_000


@dataclass
class Traffic:
    """What was asked of the workers: all of it was acknowledged by the broker."""

    work: list[str] = field(default_factory=list)
    flows: list[tuple[AsyncResult[int], int]] = field(default_factory=list)  # and what must come out
    asks: dict[str, Ask] = field(default_factory=dict)


class Field:
    def __init__(
        self, cluster: Cluster, net: Network, watch: "Watch", sampler: "Sampler", handlers_s: float
    ) -> None:
        self.cluster = cluster
        self.net = net
        self.watch = watch
        self.sampler = sampler
        self.handlers_s = handlers_s
        self.traffic = Traffic()
        self.began_s = 0.0  # on the boot clock

    def journal(self, name: str) -> Path:
        return self.cluster.home / f"{name}.journal"

    @property
    def records(self) -> Path:
        return self.cluster.home / "records"

    def run(self, schedule: Sequence[Disturbance], chance: random.Random, say: Callable[[str], None]) -> None:
        """Have it all happen, while there is work."""
        self.began_s = boot_time_s()
        todo = changes(schedule)
        ends_s = max(one.at_s for one in todo)
        send_s, said_s, sent = 0.0, 0.0, 0
        while todo:
            now_s = boot_time_s() - self.began_s
            while todo and todo[0].at_s <= now_s:
                change = todo.pop(0)
                self.net.set_weather(change.place, change.weather)
            if now_s >= send_s:
                self.send(sent, chance)
                sent, send_s = sent + 1, now_s + 0.2
            if now_s >= said_s:
                ended = sum(one.ends_s <= now_s for one in schedule)
                states = " ".join(f"{name}:{self.watch.states.get(name, '?')}" for name in WORKERS)
                say(
                    f"{now_s:.0f} of {ends_s:.0f} s, {ended} of {len(schedule)} over, {sent} rounds; {states}"
                )
                said_s = now_s + 15
            due_s = min([send_s, *(one.at_s for one in todo[:1])])
            wait_until(
                lambda due_s=due_s: boot_time_s() - self.began_s >= due_s,  # type: ignore[misc]
                what="the next moment",
            )

    def send(self, number: int, chance: random.Random) -> None:
        tasks = self.cluster.app.tasks
        work, add, total = (tasks[f"partition_work.{name}"] for name in ("work", "add", "total"))
        journal, flows = str(self.journal("work")), str(self.journal("flows"))
        self.traffic.work.append(work.delay(journal, number, chance.choice((0.0, 0.05, 0.5))).id)
        if number % 25 == 5:
            steps = chain(work.s(flows, number, 0.1), *(add.s(flows, step) for step in range(4)))
            self.traffic.flows.append((steps.delay(), number + 6))
        if number % 25 == 15:
            parts = [work.s(flows, part, 0.1) for part in range(6)]
            self.traffic.flows.append((chord(parts)(total.s(flows)), 15))
        if number % 15 == 10:
            self._ask(f"e{number}", chance)

    def _ask(self, election_id: str, chance: random.Random) -> None:
        topic = chance.choice(("once", "again"))
        policy = Policy.AT_MOST_ONCE if topic == "once" else Policy.AT_LEAST_ONCE
        seconds = chance.uniform(0.0, 1.0) if topic == "once" else chance.uniform(0.0, self.handlers_s)
        self.traffic.asks[election_id] = Ask(boot_time_s(), election_id, policy, topic, seconds)
        self.cluster.app.control.election(election_id, topic, {"seconds": seconds}, timeout=0)

    def unfinished(self) -> int:
        """Tasks and workflows without a result."""
        kept = self.cluster.app.backend.read(self.traffic.work)
        ended = sum(one.status in READY_STATES for one in kept.values())
        return len(self.traffic.work) - ended + sum(not one.ready() for one, _ in self.traffic.flows)

    def elections(self) -> dict[str, ElectionRecord]:
        """What the store has of them."""
        return asyncio.run(self._elections())

    async def _elections(self) -> dict[str, ElectionRecord]:
        broker = open_broker(self.cluster.app.settings.for_broker())
        await broker.open()
        try:
            kept = {}
            for name in self.traffic.asks:
                record = await broker.coordination.read_election(election_key(NAMESPACE, name))
                assert record is not None, f"the store has no election {name}"
                kept[name] = record
            return kept
        finally:
            await broker.close()


class Watch:
    """`umbel members --watch`: everything it says, by when it was said."""

    def __init__(self, cluster: Cluster) -> None:
        self.changes: list[tuple[float, str, str]] = []  # boot time, name, what became of it
        self.states: dict[str, str] = {}
        command = [sys.executable, "-m", "umbel.cli.main", "members", "--watch", "--json"]
        self._process = subprocess.Popen(
            [*command, "-b", cluster.app.settings.broker],
            cwd=cluster.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            row = json.loads(line)
            name = row["node"].partition("@")[0]
            self.changes.append((boot_time_s(), name, row["change"]))
            self.states[name] = row["change"]
        self._process.stdout.close()


class Sampler:
    """Reads from the store who leads, several times a second."""

    def __init__(self, cluster: Cluster) -> None:
        self.samples: list[Sample] = []
        self._settings = cluster.app.settings.for_broker()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read()), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    async def _read(self) -> None:
        broker = await self._open()
        try:
            while not self._ends.is_set() and len(self.samples) < SAMPLES_MAX:
                for name in LEASES:
                    asked_s = boot_time_s()
                    with suppress(BrokerError, TimeoutError):
                        found = await broker.coordination.read_lease(name)
                        self.samples.append(
                            Sample(asked_s, boot_time_s(), name, found.holder, found.term, found.left_s)
                        )
                await asyncio.to_thread(self._ends.wait, SAMPLE_S)
        finally:
            await broker.close()

    async def _open(self) -> Broker:
        """RabbitMQ refuses who comes while another declares its streams."""
        while True:
            broker = open_broker(self._settings)
            try:
                await broker.open()
            except BrokerError:
                await broker.close()
                await asyncio.to_thread(self._ends.wait, SAMPLE_S)
            else:
                return broker


@contextmanager
def open_field(
    broker: str, home: Path, *, heartbeat_s: float, handlers_s: float = 15.0, mutant: str = ""
) -> Iterator[Field]:
    """`handlers_s`: how long handlers of elections take at most."""
    with network(*WORKERS) as net, _server(broker, home) as (port, url):
        way = Way(port, net.here)
        address = url(net.here, way.port)
        settings = {
            "broker": address,
            "backend": address if broker == "redis" else f"sqlite:///{home / 'results.db'}",
            "scheduler_lease_s": SCHEDULER_LEASE_S,
            "lease_s": LEASE_S,
            "heartbeat_interval_s": heartbeat_s,
        }
        try:
            with Cluster(home, TASKS_FILE, **settings) as cluster:
                yield from _with_workers(cluster, net, handlers_s, mutant)
        finally:
            way.close()
            way.end()


def _with_workers(cluster: Cluster, net: Network, handlers_s: float, mutant: str) -> Iterator[Field]:
    (cluster.home / "records").mkdir()
    variables = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PARTITION_RECORDS": cluster.home / "records",
        "PARTITION_SLOTS": cluster.home / "slots.journal",
        "PARTITION_MUTANT": mutant,
    }
    given = [f"{name}={value}" for name, value in variables.items()]
    watch, sampler = Watch(cluster), Sampler(cluster)
    try:
        for name in WORKERS:
            cluster.start_worker(name, *FLAGS, prefix=[*net.inside(name), "env", *given], wait=False)
        for name in WORKERS:
            cluster.wait_for(name)
        wait_until(lambda: len(watch.states) == len(WORKERS), what="all to be members")
        yield Field(cluster, net, watch, sampler, handlers_s)
    finally:
        watch.close()
        sampler.close()


@contextmanager
def _server(broker: str, home: Path) -> Iterator[tuple[int, Callable[[str, int], str]]]:
    if broker == "amqp":
        server, vhost = shared_server(), shared_server().new_vhost()
        yield server.port, lambda host, port: f"amqp://guest:guest@{host}:{port}/{vhost}"
        return
    redis = RedisServer(home)
    redis.start()
    try:
        yield redis.port, lambda host, port: f"redis://{host}:{port}/0"
    finally:
        redis.stop()
