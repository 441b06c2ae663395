"""A signed cluster: who has no key is not obeyed, whatever is sent; who has one loses nothing.

`make test` sends some hundred bad messages to each broker, the soak ten thousand.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.app.configuration.settings import override
from umbel.brokers.interface import Broadcast
from umbel.launch.node_names import node_name
from umbel.protocol.pidbox import Request
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.message import Message, Outgoing
from umbel.wire.signing import HEADER, Keyring

TASKS_FILE = Path(__file__).with_name("signed_tasks.py")
SOAK = bool(os.environ.get("UMBEL_SOAK"))
BAD = 10_000 if SOAK else 300
GENUINE = 100 if SOAK else 30
BATCH = 100
ANSWER_S = 20.0
ENOUGH_S = 900.0 if SOAK else 90.0
OLD, NEW = "old:" + "o" * 32, "new:" + "n" * 32
STRANGER = Keyring([("new", b"another secret, same id")])
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
    settings = {"signing_keys": keys, "lease_s": 2}
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

    def send(method: str, keyring: Keyring | None, **arguments: Any) -> Broadcast:
        headers, body = encode_request(Request(method, arguments), 1, keyring, time())
        sent = Broadcast(REQUEST_EXCHANGE, "", body, headers)
        app.producer.broadcast([sent], ttl_s=60.0)
        return sent

    def distrusted() -> int:
        return sum(one["umbel"]["requests_distrusted"] for one in stats_of(cluster))

    for keyring in (None, STRANGER):
        send("shutdown", keyring)
        send("pool_grow", keyring, n=3)
    wait_until(lambda: distrusted() == 4 * workers, deadline_s=ENOUGH_S, what="four refusals")
    grown = send("pool_grow", app.settings.keyring, n=1)
    changed = replace(grown, body=grown.body.replace(b'"n":1', b'"n":9'))
    app.producer.broadcast([grown, changed, grown], ttl_s=60.0)
    wait_until(
        lambda: distrusted() == 7 * workers,
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
    with Cluster(tmp_path, TASKS_FILE, signing_keys=f"{NEW},{OLD}") as cluster:
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
