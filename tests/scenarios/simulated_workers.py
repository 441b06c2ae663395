"""Workers on the embedded broker, in virtual time: what they claim, run and settle, step by step.

Real are the broker's file, the app, its tracer (which runs the tasks, counts the parts of chords and makes
results), and the decisions: `protocol/delivery/`, `protocol/delivery/revoked.py`. Simulated
are time and the shell of the worker: it claims and runs when a step says so; it renews its lease and looks
for the messages of lost workers as often as `worker/connection.py` does.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import time
from typing import Any

from tests.scenarios.transcripts import Simulation, Step, phrase
from umbel import App, Signature, chord
from umbel.app.running.tracer import Tracer
from umbel.brokers.interface import Ack, BrokerSettings, Claim, Delivery, Started
from umbel.brokers.sqlite.coordination import Clock
from umbel.brokers.sqlite.store import Store
from umbel.errors import TaskRevoked
from umbel.launch.project import NativeEndings, task_rules
from umbel.pools.interface import Job
from umbel.protocol.delivery import revoked
from umbel.protocol.delivery.delivery import AdmissionPolicy, Admit, Park, Refuse
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.states import REVOKED
from umbel.protocol.leadership.coordination import Instant
from umbel.sim.world import World
from umbel.wire.call import read_headers
from umbel.wire.records import Revoke
from umbel.worker.connection import LOST_CHECKS_PER_LEASE, RENEWALS_PER_LEASE
from umbel.worker.delivery.admit import arrival_of

LEASE_S = 10.0
QUEUE = "celery"
BOOTED_S = 1000.0  # when the virtual machine was started, at time 0
CALL = r"(\w+): (add|fail|total)((?: \w+)*)"


class VirtualClock(Clock):
    """The broker's clocks in the world's time. Results are dated, so the wall clock begins today."""

    def __init__(self, world: World, began: float) -> None:
        super().__init__()
        self._world, self._began = world, began
        self._tickets = count(1)

    def wall_s(self) -> float:
        return self._began + self._world.now

    def now(self) -> Instant:
        return Instant(BOOTED_S + self._world.now, self.wall_s())

    def ticket(self) -> int:
        return next(self._tickets)


def make_app(home: Path) -> App:
    app = App("tasks", broker=f"sqlite:///{home}/queue.db")

    @app.task(name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="fail")
    def fail(why: str) -> None:
        raise RuntimeError(why)

    @app.task(name="total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    return app


@dataclass(frozen=True)
class Claimed:
    delivery: Delivery
    task: str


class Node:
    """The shell of one worker."""

    def __init__(self, name: str, app: App, store: Store, say: Callable[[str], None]) -> None:
        self.name, self.store = name, store
        self.is_awake = True
        self.revoked = RevokedTasks()
        self._app, self._say = app, say
        self._owner = f"{name}@sim.1.1"
        self._cursor = 0
        self._policy = AdmissionPolicy(
            task_rules(app, app.settings), max_deliveries=app.settings.task_max_deliveries
        )
        self._tracer = Tracer(app, hostname=f"{name}@sim")
        self._claimed: dict[str, Claimed] = {}

    def begin(self) -> None:
        self.store.renew(self._owner)

    def renew(self) -> None:
        if not self.store.renew(self._owner):
            self._say(f"{self.name} learns that its lease has ended")

    def return_lost(self) -> None:
        if returned := self.store.return_lost():
            self._say(f"{self.name} returns {messages(returned)} of lost workers")

    def claim(self, limit: int) -> None:
        claim = self.store.claim(self._owner, [QUEUE], limit, self._cursor)
        if claim.lease_ended and self._claimed:
            self._say(f"{self.name} learns that its lease has ended")
        if claim.returned:
            self._say(f"{self.name} returns {messages(claim.returned)} of lost workers")
        self._learn(claim)
        for delivery in claim.deliveries:
            self._admit(delivery)

    def _learn(self, claim: Claim) -> None:
        for revoke in claim.revokes:
            self.revoked.add(revoke.task_id, revoke.expires_at, revoke.recorded_at)
            self._say(f"{self.name} reads that {revoke.task_id} is revoked")
        self._cursor = claim.revoked_cursor

    def _admit(self, delivery: Delivery) -> None:
        headers = read_headers(delivery.message)
        decision = self._policy.admit(arrival_of(delivery, headers), self.revoked, self.store.clock.wall_s())
        again = " again" if delivery.redelivered else ""
        match decision:
            case Refuse(why):
                self._say(f"{self.name} claims {headers.id} and refuses it: {why.value}")
                ending = NativeEndings(self._app)(delivery.message, QUEUE, TaskRevoked(why.value), REVOKED)
                self.store.settle([Ack(delivery.tag, ending.results, ending.follow_ups)])
            case Admit(count_start=count_start):
                if count_start:
                    self.store.settle([Started(delivery.tag)])
                self._claimed[headers.id] = Claimed(delivery, headers.task)
                self._say(f"{self.name} claims {headers.id}{again}{', alone' if decision.alone else ''}")
            case Park():
                raise AssertionError("no step sends tasks that are not due")

    def run(self, task_id: str) -> None:
        claimed = self._claimed.pop(task_id)
        delivery = claimed.delivery
        job = Job(1, claimed.task, task_id, QUEUE, delivery.message, redelivered=delivery.redelivered)
        outcome = self._tracer(job)
        self._say(f"{self.name} ran {task_id}: {outcome.kind}, {outcome.summary}")
        settled = self.store.settle([Ack(delivery.tag, outcome.results, outcome.follow_ups)])
        if settled.conflicts:
            self._say(f"{self.name} cannot acknowledge {task_id}: its claim has ended")

    def take_in(self, peer: str, said: Mapping[str, Any]) -> None:
        """As `worker/steps/mingle.py` does: what Celery's nodes say goes into the record."""
        now = self.store.clock.wall_s()
        for task_id in revoked.take_in(said, self.revoked, now).news:
            self._say(f"{self.name} hears from {peer} that {task_id} is revoked")
            if "ages" not in said:
                self.store.revoke([Revoke(task_id, now, now + self.store.settings.revoke_retention_s)])

    def close(self) -> None:
        self._tracer.close()
        self.store.close()


class SimulatedWorkers(Simulation):
    def __init__(self, home: Path, names: Sequence[str], steps: Sequence[Step]) -> None:
        super().__init__()
        self._world = World("workers")
        self._clock = VirtualClock(self._world, time())
        self._app = make_app(home)
        self._store = self._open()
        self._nodes = {name: Node(name, self._app, self._open(), self.say) for name in names}
        for node in self._nodes.values():
            node.begin()
            self._repeat(node, node.renew, LEASE_S / RENEWALS_PER_LEASE)
            self._repeat(node, node.return_lost, LEASE_S / LOST_CHECKS_PER_LEASE)

    def _open(self) -> Store:
        store = Store(BrokerSettings(self._app.settings.broker, lease_s=LEASE_S))
        store.clock = self._clock
        store.open()
        return store

    def _repeat(self, node: Node, work: Callable[[], None], every_s: float) -> None:
        def turn() -> None:
            self._world.after(every_s, turn)
            if node.is_awake:
                work()

        self._world.after(every_s, turn)

    @property
    def now(self) -> float:
        return self._world.now

    def run(self, until: float) -> None:
        self._world.run(until)

    def __exit__(self, *_: object) -> None:
        for node in self._nodes.values():
            node.close()
        self._store.close()
        self._app.close()

    # ---- what clients do ---------------------------------------------------------------------------

    @phrase(rf"client sends {CALL}")
    def _send(self, task_id: str, task: str, arguments: str) -> None:
        self._call(task_id, task, arguments).delay()
        self._say_depth()

    @phrase(r"client sends a chord of (.+); then (.+)")
    def _send_chord(self, parts: str, body: str) -> None:
        header = [self._call(*found) for found in re.findall(CALL, parts)]
        (end,) = [self._call(*found) for found in re.findall(CALL, body)]
        chord(header, end).delay()
        self._say_depth()

    @phrase(r"client revokes (\w+)")
    def _revoke(self, task_id: str) -> None:
        self._app.revoke([task_id])

    def _call(self, task_id: str, task: str, arguments: str) -> Signature[Any]:
        given = [int(one) if one.isdigit() else one for one in arguments.split()]
        return self._app.signature(task, given, task_id=task_id)

    def _say_depth(self) -> None:
        ready = self._store.depths()[QUEUE].ready
        self.say(f"{messages(ready)} wait{'s' if ready == 1 else ''}")

    # ---- what workers do ---------------------------------------------------------------------------

    @phrase(r"(\w+) claims up to (\d+)")
    def _claim(self, node: str, limit: str) -> None:
        self._nodes[node].claim(int(limit))

    @phrase(r"(\w+) runs (\w+)")
    def _run(self, node: str, task_id: str) -> None:
        self._nodes[node].run(task_id)

    @phrase(r"(\w+) (?:dies|stands still)")
    def _silence(self, node: str) -> None:
        self._nodes[node].is_awake = False

    @phrase(r"(\w+) goes on")
    def _wake(self, node: str) -> None:
        self._nodes[node].is_awake = True

    @phrase(r"(\w+), a node of Celery, says hello to (\w+) and has revoked (\w+)")
    def _celery_says_hello(self, peer: str, node: str, task_id: str) -> None:
        self._nodes[node].take_in(peer, {"from_node": peer, "revoked": [task_id]})

    @phrase(r"(\w+) says hello to (\w+)")
    def _say_hello(self, node: str, peer: str) -> None:
        said = revoked.hello(node, self._nodes[node].revoked, self._clock.wall_s())
        self._nodes[peer].take_in(node, said)

    # ---- what there is to see ----------------------------------------------------------------------

    @phrase(r"what became of ([\w ]+)\?")
    def _look(self, task_ids: str) -> None:
        for task_id in task_ids.split():
            found = self._app.AsyncResult(task_id)
            self.say(f"{task_id}: {found.state}{'' if found.result is None else f', {found.result!r}'}")


def messages(number: int) -> str:
    return f"{number} message{'' if number == 1 else 's'}"
