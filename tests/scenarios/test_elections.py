"""Elections with real workers, on every broker, while workers are killed (E1 to E5)."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import time

import pytest

from tests.cluster import Cluster
from tests.scenarios.places import Place, place
from tests.servers.redis import RedisServer
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel.app.app import App
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerUnavailable, ElectionError, ElectionTimeout, LeaseTimeout, UnknownTopic
from umbel.protocol.leadership.coordination import NAMESPACE, ElectionRequest, Policy, election_key

SOAK = bool(os.environ.get("UMBEL_SOAK"))
ELECTIONS = 200 if SOAK else 40
KILLS = 8 if SOAK else 1
CLASSIC_ELECTIONS = 200 if SOAK else 15
WORKERS = ("w1", "w2", "w3", "w4", "w5") if SOAK else ("w1", "w2", "w3")
AT_ONCE = 8
TASKS_FILE = Path(__file__).with_name("election_tasks.py")
FLAGS = ("-c", "1", "-P", "solo", "-l", "INFO")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["sqlite", "redis", "amqp"])
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


class Field:
    """A cluster and the journal its handlers and tasks write."""

    def __init__(self, cluster: Cluster, journal: Path) -> None:
        self.cluster = cluster
        self.journal = journal

    def start(self, *names: str) -> None:
        """All at once: they take seconds. Those that were started before are waited for too."""
        for name in names:
            self.cluster.start_worker(name, *FLAGS, wait=False)
        for name in self.cluster.workers:
            self._wait_until_up(name)

    def wait_until_acquainted(self) -> None:
        """The classic rules need equal views of who is there."""
        for name in self.cluster.workers.keys() - {"deaf"}:
            self._wait_until_it_knows(name, len(self.cluster.workers) - 1)

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def sent(self) -> Counter[str]:
        """The names that tasks wrote, each as often as it was sent: a task that was cut off runs again."""
        written = {tuple(line.split()) for line in self.lines()}
        return Counter(words[0] for words in written if len(words) == 2)

    def counted(self, counter: str) -> int:
        return sum(self.cluster.counters(name).get(counter, 0) for name in self.cluster.workers)

    def report(self, name: str, timeout: float) -> str:
        """Have one worker send the task that writes this name; how that election ended."""
        task = self.cluster.app.tasks["election_tasks.report"]
        call = task.s(str(self.journal), name).to_map()
        return self.cluster.app.control.election(name, "task", call, timeout=timeout).state

    def _wait_until_up(self, name: str) -> None:
        pid = self.cluster.workers[name].pid

        def is_up() -> bool:
            state = self.cluster.state_of(name)
            return state is not None and state.healthy and state.fields["pid"] == pid

        wait_until(is_up, what=f"{name} to be ready")

    def _wait_until_it_knows(self, name: str, others: int) -> None:
        wait_until(
            lambda: self.cluster.log(name).count("node joined") >= others,
            what=f"{name} to know {others} others",
        )


@contextmanager
def field(where: Place, home: Path, **settings: object) -> Iterator[Field]:
    place = {
        "broker": where.broker,
        "backend": where.backend,
        "coordination_store": where.coordination_store,
    }
    with Cluster(home, TASKS_FILE, **place, **settings) as cluster:
        yield Field(cluster, home / "journal")


def test_each_elected_task_is_sent_once_or_reported_failed_while_workers_die(
    where: Place, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with field(where, tmp_path) as here, ThreadPoolExecutor(AT_ONCE) as clients:
        elections_tell_how_they_ended(here)
        if where.broker.startswith("sqlite"):  # commands are the same everywhere, and slow to start
            commands_show_them(here)
        here.start(*WORKERS[1:])
        names = [f"e{number}" for number in range(ELECTIONS)]
        held = [clients.submit(here.report, name, 120.0) for name in names]
        kill_at_random(here, held, random.Random(seed))
        states = {name: one.result() for name, one in zip(names, held, strict=True)}
        sent = {name for name, state in states.items() if state == "done"}
        wait_until(lambda: sent <= set(here.sent()), what="the tasks to run")
        runs = {name: times for name, times in here.sent().items() if name in states}
        print(f"{Counter(states.values())}, {KILLS} workers killed")
    assert set(states.values()) <= {"done", "failed"}
    assert max(runs.values()) == 1, {name: times for name, times in runs.items() if times > 1}
    assert len(sent) >= ELECTIONS - KILLS * AT_ONCE


def elections_tell_how_they_ended(here: Field) -> None:
    """Before the first worker is there, and with one (E3, E4, E5)."""
    elect, write = here.cluster.app.control.election, {"journal": str(here.journal)}
    wait_until(lambda: is_still_open(here, "early"), what="nobody to take the election")
    elect("stale", "write", write, expires=0.01, timeout=0)
    asyncio.run(open_and_tell_nobody(here, "unheard"))
    here.start(WORKERS[0])
    wait_until(lambda: any("unheard" in line for line in here.lines()), what="the sweep")
    assert elect("stale", "write", write, timeout=30).state == "expired"
    outcome = elect("early", "write", write, timeout=30)
    assert (outcome.state, outcome.outcome) == ("done", "ok: wrote in journal")
    assert elect("early", "write", write, timeout=30) == outcome
    assert sorted(line.split()[0] for line in here.lines()) == ["early", "unheard"]
    failed = elect("bad", "fail", "it", timeout=30)
    assert (failed.state, failed.ok) == ("failed", False) and "cannot do it" in failed.outcome
    with pytest.raises(UnknownTopic, match=r"'nothing'.*it has again, cut, fail, task, write"):
        elect("odd", "nothing", timeout=30)
    result = here.cluster.app.tasks["election_tasks.report"].s(str(here.journal), "sent").election()
    assert result.get(timeout=90) == "sent"


def is_still_open(here: Field, election_id: str) -> bool:
    """A busy machine may take longer than that to reach the broker, which is another error."""
    try:
        here.cluster.app.control.election(election_id, "write", {"journal": str(here.journal)}, timeout=1.0)
    except ElectionTimeout as error:
        return "still open" in str(error)
    except BrokerUnavailable:
        return False
    raise AssertionError("somebody took it")


async def open_and_tell_nobody(here: Field, election_id: str) -> None:
    """As if the message to the workers were lost."""
    action = json.dumps({"journal": str(here.journal)}).encode()
    request = ElectionRequest(election_id, "write", action, Policy.AT_MOST_ONCE, asked_at=time())
    broker = open_broker(here.cluster.app.settings.for_broker())
    await broker.open()
    try:
        await broker.coordination.open_election(election_key(NAMESPACE, election_id), request)
    finally:
        await broker.close()


def commands_show_them(here: Field) -> None:
    run = here.cluster.umbel_json
    assert run("election", "show", "bad")["outcome"] == "error: RuntimeError('cannot do it')"
    assert run("election", "ls") == []
    odd = run("election", "show", "odd")  # nobody can take it: it does not stay open
    assert odd["state"] == "failed" and "no worker handles elections of topic 'nothing'" in odd["outcome"]
    action = f'{{"journal": "{here.journal}"}}'
    assert run("election", "start", "write", action, "--id", "typed")["state"] == "done"
    assert here.cluster.umbel("election", "show", "never", check=False).returncode == 3


def test_an_unknown_topic_is_reported_under_v1_too(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, election_protocol="v1") as cluster:
        cluster.start_worker("w1", "-c", "1")
        with pytest.raises(UnknownTopic, match=r"'nothing'.*it has again, cut, fail, task, write"):
            cluster.app.control.election("odd", "nothing", timeout=20)
        assert "election request refused by this node election=odd" in cluster.log("w1")
        journal = {"journal": str(tmp_path / "journal.txt")}
        assert cluster.app.control.election("even", "write", journal, timeout=20).state == "open"
        wait_until((tmp_path / "journal.txt").exists, what="the handler to run")


def test_workers_that_take_part_in_no_such_election_say_why(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, election_protocol="v1") as cluster:
        elect = ("election", "start", "write", "{}", "--timeout", "20")
        cluster.start_worker("deaf", "-P", "solo", "--without-gossip")
        with pytest.raises(ElectionError, match=r"gossip is off.*start the worker without --without-gossip"):
            cluster.app.control.election("lone", "write", timeout=20)
        cluster.stop_worker("deaf")
        cluster.start_worker("classic", "-P", "solo")
        done = cluster.umbel(*elect, check=False, prefix=("env", "UMBEL_ELECTION_PROTOCOL=v2"))
        assert done.returncode != 0
        assert "is v1, and the election was started under v2; set the same" in done.stderr


def test_a_lease_has_one_leader_at_a_time_e6(where: Place, tmp_path: Path) -> None:
    with field(where, tmp_path) as here:
        asyncio.run(lead_in_turn(here.cluster.app))


async def lead_in_turn(app: App) -> None:
    async with app.lease("beat") as first:
        assert await first.send([app.signature("tick", queue="ticks")])
        with pytest.raises(LeaseTimeout):
            async with app.lease("beat", timeout=0.5):
                pass
        assert first.still_mine()
        waiting = asyncio.create_task(lead_once(app))
    term = await waiting
    assert term > first.term


async def lead_once(app: App) -> int:
    async with app.lease("beat", timeout=30) as lease:
        return lease.term


def kill_at_random(here: Field, held: Sequence[Future[str]], chance: random.Random) -> None:
    for kill in range(KILLS):
        wait_for_some(held, (kill + 1) * ELECTIONS // (KILLS + 2))
        name = chance.choice(WORKERS)
        here.cluster.kill_worker(name)
        here.start(name)


def wait_for_some(held: Sequence[Future[str]], count: int) -> None:
    wait_until(lambda: sum(one.done() for one in held) >= count, deadline_s=120, what=f"{count} elections")


def test_the_classic_rules_elect_one_worker_e1_e2(where: Place, tmp_path: Path) -> None:
    with field(where, tmp_path, election_protocol="v1") as here:
        here.start(*WORKERS)
        here.wait_until_acquainted()
        names = [f"e{number}" for number in range(CLASSIC_ELECTIONS)]
        for first in range(0, len(names), AT_ONCE):
            elect_by_classic_rules(here, names[first : first + AT_ONCE])
        assert here.sent() == Counter(names)
        wait_until(lambda: here.counted("elections_done") == len(names), what="all to be counted")


def elect_by_classic_rules(here: Field, names: Sequence[str]) -> None:
    """Few at a time: each costs N + N² events, and a node that is late with them has no part in it."""
    for name in names:
        here.report(name, 0.0)
    wait_until(lambda: set(names) <= set(here.sent()), deadline_s=120, what="every task to run")


def test_workers_of_both_protocols_elect_one_that_acts(where: Place, tmp_path: Path) -> None:
    """Also where workers take no part: one hears no candidates, one has no handler for the topic."""
    with field(where, tmp_path, election_protocol="v1") as here:
        start = here.cluster.start_worker
        start("c1", *FLAGS, wait=False)
        start("c2", *FLAGS, wait=False)
        start("deaf", *FLAGS, "--without-gossip", wait=False)
        start("unable", *FLAGS, wait=False, prefix=("env", "CANNOT_WRITE=1"), election_protocol="v2")
        here.start()
        here.wait_until_acquainted()
        elect_writers(here, [f"by c{number}" for number in range(CLASSIC_ELECTIONS)])
        assert here.cluster.counters("unable")["elections_run"] == 0
        start("able", *FLAGS, wait=False, election_protocol="v2")
        here.start()
        here.wait_until_acquainted()
        names = [f"by able {number}" for number in range(CLASSIC_ELECTIONS)]
        elect_writers(here, names)
        wait_until(
            lambda: here.cluster.counters("able")["elections_done"] == len(names), what="all to be counted"
        )
        by_the_store = ("election", "start", "write", f'{{"journal": "{here.journal}"}}', "--id", "stored")
        here.cluster.umbel(*by_the_store, prefix=("env", "UMBEL_ELECTION_PROTOCOL=v2"))
        elect_writers(here, ["last"])
        assert Counter(line.rsplit(maxsplit=2)[0] for line in here.lines())["stored"] == 1
        assert here.counted("elections_failed") == 0


def elect_writers(here: Field, names: Sequence[str]) -> None:
    for name in names:
        here.cluster.app.control.election(name, "write", {"journal": str(here.journal)}, timeout=0)

    def acted() -> Counter[str]:
        return Counter(line.rsplit(maxsplit=2)[0] for line in here.lines())

    wait_until(lambda: set(names) <= set(acted()), what="every election to act")
    assert {acted()[name] for name in names} == {1}


@pytest.mark.skipif(not SOAK, reason="it waits for a whole ttl; the machine's test does it in no time")
def test_a_handler_that_stops_because_it_was_cut_off_is_followed_by_another_run(tmp_path: Path) -> None:
    """The one worker is behind a black hole for a ttl. When it is back, the election is not done."""
    redis = RedisServer(tmp_path)
    redis.start()
    way = Way(redis.port)
    try:
        with Cluster(tmp_path, TASKS_FILE, broker=redis.url, lease_s=2.0) as cluster:
            cluster.start_worker("w", "-c", "1", broker=f"redis://127.0.0.1:{way.port}/0")
            journal = tmp_path / "journal"
            action = {"journal": str(journal)}
            cluster.app.control.election("cut off", "cut", action, timeout=0)
            wait_until(journal.exists, what="the first run")
            way.silence()
            wait_until(lambda: "1 ended" in journal.read_text(), what="it to stop")
            way.resume()
            outcome = cluster.app.control.election("cut off", "cut", action, timeout=60)
            assert (outcome.state, outcome.attempt) == ("done", 2)
            assert "2 ended" in journal.read_text()
    finally:
        way.close()
        redis.stop()


@pytest.mark.skipif(not SOAK, reason="it waits for a whole ttl; the simulator does it in no time")
def test_a_worker_that_dies_of_it_is_followed_by_another_under_a_higher_term(
    where: Place, tmp_path: Path
) -> None:
    with field(where, tmp_path) as here:
        here.start("w1", "w2")
        action = {"journal": str(here.journal)}
        outcome = here.cluster.app.control.election("once more", "again", action, timeout=60)
        (first, first_term), (second, second_term) = (line.split() for line in here.lines())
    assert (outcome.state, outcome.attempt) == ("done", 2)
    assert (first, second) == ("1", "2")
    assert int(second_term) > int(first_term)
