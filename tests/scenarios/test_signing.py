"""A signed cluster: who has no key is not obeyed, whatever is sent; who has one loses nothing.

`make test` sends some hundred bad messages to each broker, the soak ten thousand.
"""

import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator, Sized
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.servers.redis import ask_redis
from tests.waiting import wait_until
from umbel.app.settings import override
from umbel.brokers.interface import Broadcast
from umbel.launch.preparation import node_name
from umbel.outbox.table import encode_rows
from umbel.protocol.pidbox import Request
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.message import Message, Outgoing
from umbel.wire.signing import BOUND, HEADER, Keyring, Signer, signer_of

TASKS_FILE = Path(__file__).with_name("signed_tasks.py")
SOAK = bool(os.environ.get("UMBEL_SOAK"))
BAD = 10_000 if SOAK else 300
GENUINE = 100 if SOAK else 30
BATCH = 100
ANSWER_S = 20.0
ENOUGH_S = 900.0 if SOAK else 90.0
OLD, NEW = "old:" + "o" * 32, "new:" + "n" * 32
CLUSTER = "tests"
STRANGER = signer_of(Keyring([("new", b"another secret, same id")]), CLUSTER)
ELSEWHERE = signer_of(Keyring([("new", b"n" * 32)]), "staging")  # a cluster that has the same keys
DOUBTS = ("unsigned", "forged", "stale", "replayed")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(1800 if SOAK else 240)]


@pytest.fixture(params=["sqlite", "redis", "amqp"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with cluster_with(f"{NEW},{OLD}", request, tmp_path) as made:
        yield made


@pytest.fixture(params=["sqlite", "redis", "amqp"] if SOAK else ["sqlite"])
def old_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """One that knows the old key alone."""
    with cluster_with(OLD, request, tmp_path) as made:
        yield made


@contextmanager
def cluster_with(keys: str, request: pytest.FixtureRequest, home: Path) -> Iterator[Cluster]:
    settings = {"signing_keys": keys, "signing_cluster": CLUSTER, "lease_s": 2}
    with (
        place(request.param, home, durable=False) as at,
        Cluster(home, TASKS_FILE, broker=at.broker, backend=at.backend, **settings) as made,
    ):
        yield made


def runs(cluster: Cluster) -> list[str]:
    file = cluster.home / "runs.txt"
    return sorted(file.read_text().split()) if file.exists() else []


def stats_of(cluster: Cluster) -> list[dict[str, Any]]:
    """What each worker says, once all that live have answered; those that died are not waited for."""
    workers = len(cluster.workers)

    def answers() -> list[dict[str, Any]]:
        found = cluster.app.control.inspect(timeout=ANSWER_S, limit=workers).stats() or {}
        return list(found.values()) if len(found) == workers else []

    return wait_until(answers, deadline_s=ENOUGH_S, what="the answers of all workers")


def counted(cluster: Cluster, *names: str) -> int:
    return sum(one["umbel"]["counters"][name] for one in stats_of(cluster) for name in names)


def call(cluster: Cluster, word: str) -> Outgoing:
    return cluster.app.prepare("signed_tasks.note", [str(cluster.home), word], {}, {}).outgoing


def with_headers(message: Message, **changes: object) -> Message:
    headers = {**json.loads(message.headers), **changes}
    return replace(message, headers=json.dumps(headers).encode())


def without(message: Message, name: str) -> Message:
    headers = json.loads(message.headers)
    del headers[name]
    return replace(message, headers=json.dumps(headers).encode())


def bad_messages(cluster: Cluster, genuine: list[Outgoing], chance: random.Random) -> Iterator[Outgoing]:
    """What somebody makes who reads every message and has no key."""
    kinds: list[Callable[[Outgoing, Outgoing], Outgoing]] = [
        lambda one, _: one,  # once more, as it was
        lambda one, _: replace(one, message=without(one.message, HEADER)),
        lambda one, _: STRANGER.sign_task(one, time()),
        lambda one, _: ELSEWHERE.sign_task(one, time()),
        lambda one, _: Outgoing("celery", without(one.message, BOUND)),
        lambda one, _: Outgoing("celery", replace(one.message, priority=9)),
        lambda one, _: Outgoing("celery", replace(one.message, properties=b'{"app_id":"other"}')),
        lambda one, _: Outgoing("celery", with_headers(one.message, id=f"{chance.random()}")),
        lambda one, _: Outgoing("celery", with_headers(one.message, task="signed_tasks.early")),
        lambda one, _: Outgoing("celery", with_headers(one.message, expires=None, retries=1)),
        lambda one, _: Outgoing("celery", with_headers(one.message, umbel_signature="1:new:1:" + "0" * 64)),
        lambda one, _: Outgoing("celery", replace(one.message, body=one.message.body.replace(b"g", b"e"))),
        lambda one, _: Outgoing("celery", replace(one.message, body=cut(one.message.body, chance))),
        lambda one, _: Outgoing("celery", without(one.message, chance.choice(["root_id", "origin", "lang"]))),
        lambda one, other: Outgoing("celery", replace(one.message, body=other.message.body)),
        lambda one, other: Outgoing("celery", replace(one.message, headers=other.message.headers)),
        lambda one, _: Outgoing(
            "celery", replace(one.message, content_type="application/x-python-serialize")
        ),
    ]
    for number in range(BAD):
        one, other = chance.sample(genuine, 2)
        yield kinds[number % len(kinds)](one, other)


def cut(body: bytes, chance: random.Random) -> bytes:
    return body[: chance.randrange(len(body))]


def test_nothing_runs_that_was_forged_copied_cut_or_put_together(cluster: Cluster) -> None:
    cluster.start_worker("a", "-c", "2")
    cluster.start_worker("b", "-c", "2")
    genuine = [call(cluster, f"genuine-{number}") for number in range(GENUINE)]
    bad = list(bad_messages(cluster, genuine, random.Random(7)))
    wanted = sorted(f"genuine-{number}" for number in range(GENUINE))
    producer = cluster.app.producer
    # Copies come before, among and after the originals: of each, one runs.
    producer.publish(genuine[: GENUINE // 2])
    for first in range(0, BAD, BATCH):
        producer.publish(bad[first : first + BATCH])
    producer.publish(genuine[GENUINE // 2 :])
    total = BAD + GENUINE
    wait_until(
        lambda: counted(cluster, "buried", "succeeded") >= total,
        deadline_s=ENOUGH_S,
        what="the end of every message",
    )
    assert runs(cluster) == wanted
    assert counted(cluster, *DOUBTS) == counted(cluster, "buried") == BAD
    assert all(counted(cluster, doubt) for doubt in ("unsigned", "forged", "replayed"))
    # The dead letters say why; giving them back runs none of them.
    letters = cluster.umbel_json("dlq", "ls", "--limit", "1000")
    assert {one["reason"].partition(":")[0] for one in letters} <= {"unsigned", "forged", "replayed"}
    cluster.umbel("dlq", "requeue", *(str(one["id"]) for one in letters[:200]))
    wait_until(lambda: counted(cluster, "buried") > BAD, deadline_s=ENOUGH_S, what="the first to come back")
    assert cluster.app.tasks["signed_tasks.note"].delay(str(cluster.home), "last").get(timeout=60) == "last"
    assert runs(cluster) == sorted([*wanted, "last"])
    check_commands(cluster)


def check_commands(cluster: Cluster) -> None:
    """One that changes something must be signed, and is obeyed once."""
    app, workers = cluster.app, 2
    assert app.settings.keyring is not None

    def send(method: str, signer: Signer | None, **arguments: Any) -> Broadcast:
        headers, body = encode_request(Request(method, arguments), 1, signer, time())
        sent = Broadcast(REQUEST_EXCHANGE, "", body, headers)
        app.producer.broadcast([sent], ttl_s=60.0)
        return sent

    def distrusted() -> int:
        return sum(one["umbel"]["requests_distrusted"] for one in stats_of(cluster))

    for signer in (None, STRANGER, ELSEWHERE):
        send("shutdown", signer)
        send("pool_grow", signer, n=3)
    wait_until(lambda: distrusted() == 6 * workers, deadline_s=ENOUGH_S, what="six refusals")
    grown = send("pool_grow", app.signing_cluster.signer(), n=1)
    changed = replace(grown, body=grown.body.replace(b'"n":1', b'"n":9'))
    app.producer.broadcast([grown, changed, grown], ttl_s=60.0)
    wait_until(
        lambda: distrusted() == 9 * workers,
        deadline_s=ENOUGH_S,
        what="the copies and the changed one to be refused",
    )
    assert [one["pool"]["max-concurrency"] for one in stats_of(cluster)] == [3] * workers
    # Whoever only looks needs no key; and who has none is told why it is not obeyed.
    app.settings = override(app.settings, signing_keys=[])
    app.control.close()
    assert app.control.ping(timeout=ANSWER_S, limit=workers)
    refused = app.control.ask("pool_grow", {"n": 1}, timeout=ANSWER_S, limit=workers).replies
    assert ["unsigned" in one["error"] for one in refused.values()] == [True] * workers


# The contract of signatures holds all brokers to it; RabbitMQ has the most that could go wrong.
@pytest.mark.parametrize("cluster", ["sqlite", "redis", "amqp"] if SOAK else ["amqp"], indirect=True)
def test_a_worker_that_dies_stops_or_gives_back_loses_no_signed_task(cluster: Cluster) -> None:
    """Redelivery keeps the signature, retries renew it, and what is sent again after its ack is renewed."""
    home, tasks = str(cluster.home), cluster.app.tasks
    cluster.start_worker("dies", "-c", "1")
    killed = tasks["signed_tasks.held_up"].delay(home, "killed")
    wait_until(
        lambda: list(cluster.home.glob("killed.*.started")), deadline_s=ENOUGH_S, what="the task to run"
    )
    cluster.kill_worker("dies")
    cluster.start_worker("stops", "-c", "1")
    wait_until(
        lambda: len(list(cluster.home.glob("killed.*.started"))) == 2,
        what="the dead worker's task to run again",
    )
    waiting = [tasks["signed_tasks.early"].delay(home, f"early-{number}") for number in range(10)]
    waiting.append(tasks["signed_tasks.second_try"].delay(home, "second"))
    (cluster.home / "gate").touch()
    cluster.stop_worker("stops")
    cluster.start_worker("last", "-c", "1")
    assert all(one.get(timeout=60) for one in [killed, *waiting])
    assert runs(cluster) == sorted(["killed", *(f"early-{number}" for number in range(10)), "second"])
    assert counted(cluster, *DOUBTS) == 0
    # What was buried for another reason may be given back.
    cluster.app.send_task("signed_tasks.unknown", [])
    letters = wait_until(lambda: cluster.umbel_json("dlq", "ls"), deadline_s=ENOUGH_S, what="a dead letter")
    assert "unknown" in letters[0]["task"]
    cluster.umbel("dlq", "requeue", "--all")
    wait_until(
        lambda: counted(cluster, "buried") == 2, deadline_s=ENOUGH_S, what="the letter to be judged again"
    )
    assert counted(cluster, *DOUBTS) == 0


def has_grown(sent: Sized, to: int) -> bool:
    return len(sent) >= to


def test_keys_are_rotated_under_load_and_nothing_is_lost(old_cluster: Cluster) -> None:
    """The new key is added behind the old one, then put first, then the old one goes."""
    cluster = old_cluster
    app, home = cluster.app, str(cluster.home)
    chain = app.tasks["signed_tasks.second_try"].s(home, "first")
    sent: list[Any] = []
    done = Event()

    def load() -> None:
        number = 0
        while not done.wait(0.05):
            number += 1
            then = app.tasks["signed_tasks.note"].si(home, f"load-{number}")
            sent.append((chain | then).delay())

    cluster.start_worker("w0", "-c", "2")
    sender = Thread(target=load)
    sender.start()
    try:
        steps = [(f"{OLD},{NEW}", (OLD, NEW)), (f"{NEW},{OLD}", (NEW, OLD)), (NEW, (NEW,))]
        for number, (keys, ours) in enumerate(steps, 1):
            cluster.start_worker(f"w{number}", "-c", "2", signing_keys=keys)
            cluster.stop_worker(f"w{number - 1}")
            if number < len(steps):  # the last worker knows the new key alone: nobody uses the old one now
                app.settings = override(app.settings, signing_keys=list(ours))
            wait_until(partial(has_grown, sent, len(sent) + 4), what="more to be sent")
            if number == 2:
                so_far = list(sent)
                assert all(one.get(timeout=60) for one in so_far)
    finally:
        done.set()
        sender.join()
    assert len(sent) > 10
    assert [one.get(timeout=60) for one in sent] == [f"load-{n}" for n in range(1, len(sent) + 1)]
    assert counted(cluster, *DOUBTS) == 0
    assert cluster.umbel_json("dlq", "ls") == []


def test_unsigned_messages_are_taken_where_the_worker_says_so_and_nothing_shows_a_key(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, signing_keys=f"{NEW},{OLD}", signing_cluster=CLUSTER) as cluster:
        cluster.start_worker("w", "-c", "1", "-Q", "celery,open", "-l", "DEBUG", accept_unsigned="open")
        note, home = cluster.app.tasks["signed_tasks.note"], str(tmp_path)
        patiently = ("-d", node_name("w"), "--timeout", "20")
        told = "".join(cluster.umbel("inspect", one, *patiently).stdout for one in ("conf", "report"))
        doctor = cluster.umbel("doctor").stdout
        assert "new:***" in told
        assert "new, old" in doctor
        everything = told + doctor + cluster.log("w") + repr(cluster.app.settings)
        assert "n" * 32 not in everything
        assert "o" * 32 not in everything
        cluster.app.settings = override(cluster.app.settings, signing_keys=[])
        note.apply_async((home, "closed"), queue="celery")
        assert note.apply_async((home, "open"), queue="open").get(timeout=60) == "open"
        wait_until(
            lambda: counted(cluster, "unsigned") == 1, deadline_s=ENOUGH_S, what="the other one to be refused"
        )
        assert runs(cluster) == ["open"]


def test_what_a_transaction_sends_is_bound_and_counted_from_when_it_is_published(tmp_path: Path) -> None:
    """It is written without the broker, may lie for days, and a row that somebody copies runs once."""
    own = f"{tmp_path}/own.db"
    with Cluster(tmp_path, TASKS_FILE, signing_keys=NEW, outbox=f"sqlite:///{own}") as cluster:
        cluster.umbel("outbox", "create")
        app, note = cluster.app, cluster.app.tasks["signed_tasks.note"]
        keyring = app.settings.keyring
        assert keyring is not None
        with closing(sqlite3.connect(own)) as database:
            with app.outbox(database):  # no cluster id is made yet, and nobody is asked for it
                note.delay(str(cluster.home), "sent")
            database.commit()
            cluster.umbel("cluster-id", "make", CLUSTER)
            captured, unsigned, old = (call(cluster, word) for word in ("captured", "unsigned", "old"))
            old = keyring.sign_row(old, time() - 3 * 86_400)
            unsigned = replace(unsigned, message=without(unsigned.message, HEADER))
            app.producer.publish([captured])
            cluster.start_worker("w", "-c", "1")
            wait_until(lambda: "captured" in runs(cluster), what="what was not in the outbox")
            rows = encode_rows([old, old, unsigned, captured])
            database.executemany("INSERT INTO umbel_outbox (task_id, message) VALUES (?, ?)", rows)
            database.commit()
        wait_until(lambda: counted(cluster, "replayed", "unsigned") == 2, what="two to be refused")
        assert note.delay(str(cluster.home), "last").get(timeout=60) == "last"
        assert runs(cluster) == ["captured", "last", "old", "sent"]
        assert counted(cluster, "unsigned") == 1


def test_clocks_may_differ_by_less_than_the_window(tmp_path: Path) -> None:
    """Of sender and worker; a command is obeyed within two minutes."""
    settings = {"signing_keys": NEW, "signing_cluster": CLUSTER}
    with Cluster(tmp_path, TASKS_FILE, **settings, signing_window_s=1800) as cluster:
        cluster.start_worker("w", "-c", "1")
        signer = cluster.app.signing_cluster.signer()
        assert signer is not None
        wanted: list[str] = []
        for minutes, runs_here in ((-29, True), (29, True), (-31, False), (31, False), (600, False)):
            word = f"by-{minutes}-minutes"
            wanted += [word] if runs_here else []
            cluster.app.producer.publish([signer.sign_task(call(cluster, word), time() + 60 * minutes)])
        wait_until(lambda: counted(cluster, "stale") == 3, deadline_s=ENOUGH_S, what="three to be refused")
        assert runs(cluster) == sorted(wanted)
        reasons = sorted(one["reason"] for one in cluster.umbel_json("dlq", "ls"))
        assert [("in the future; compare the clocks" in one) for one in reasons] == [True, True, False]
        for seconds, obeyed, distrusted in ((100, 1, 0), (200, 1, 1)):
            headers, body = encode_request(Request("pool_grow", {"n": 1}), 1, signer, time() + seconds)
            cluster.app.producer.broadcast([Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=60)

            def answered(expected: tuple[int, int] = (1 + obeyed, distrusted)) -> bool:
                (found,) = stats_of(cluster)
                sizes = found["pool"]["max-concurrency"], found["umbel"]["requests_distrusted"]
                return sizes == expected

            wait_until(answered, deadline_s=ENOUGH_S, what="the command to be answered")


@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_a_broker_that_loses_the_record_of_used_signatures_runs_nothing_until_somebody_decides(
    broker: str, tmp_path: Path
) -> None:
    """With the record goes the id of the cluster, so the loss is noticed, and no id is made in its place."""
    with (
        place(broker, tmp_path, durable=False) as at,
        Cluster(tmp_path, TASKS_FILE, broker=at.broker, backend=at.backend, signing_keys=NEW) as cluster,
    ):
        cluster.umbel("cluster-id", "make", "first")
        cluster.start_worker("w", "-c", "1")
        captured = call(cluster, "once")
        cluster.app.producer.publish([captured])
        wait_until(lambda: runs(cluster) == ["once"], what="the original to run")
        lose_the_record(at.broker)
        cluster.app.producer.publish([captured, call(cluster, "waits")])
        wait_until(lambda: "lost the id of this cluster" in cluster.log("w"), what="the loss to be noticed")
        assert cluster.umbel("cluster-id", "show", check=False).returncode == 3
        assert node_name("w") in cluster.umbel("ping", "--timeout", "20").stdout  # who looks needs none
        # The messages of the old id are given up; a copy of what ran is one of them.
        assert cluster.umbel("cluster-id", "make", "second").stdout == "second\n"
        cluster.stop_worker("w")
        cluster.start_worker("w2", "-c", "1")
        wait_until(lambda: counted(cluster, "forged") == 2, what="both to be refused")
        cluster.app.signing_cluster.learn("second")
        assert cluster.app.tasks["signed_tasks.note"].delay(str(cluster.home), "new").get(timeout=60) == "new"
        assert runs(cluster) == ["new", "once"]
        # Or the id is restored, and they run; also a copy, of which nobody knows that it is one.
        lose_the_record(at.broker)
        cluster.app.producer.publish([call(cluster, "waited")])
        wait_until(lambda: "lost the id of this cluster" in cluster.log("w2"), what="the loss to be noticed")
        cluster.umbel("cluster-id", "restore", "second")
        wait_until(lambda: "waited" in runs(cluster), what="what waited to run")


def lose_the_record(url: str) -> None:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as database, database:
            database.execute("DELETE FROM signatures")
            database.execute("DELETE FROM meta WHERE name LIKE 'cluster%'")
        return
    keys = ask_redis(url, "KEYS", "umbel.signature.*")
    assert isinstance(keys, list)
    ask_redis(url, "DEL", "umbel.cluster", *keys)
