"""What somebody tries who can write to the broker and has no key, against real workers that have keys.

`Attacker` knows the broker's address, reads every message, and writes what it likes; it never uses the keys.
"""

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.scenarios.signed_tasks import runs_of
from tests.waiting import wait_until
from umbel import App, Signature, chain, chord
from umbel.brokers.interface import Broadcast, Refused
from umbel.brokers.registry import open_broker
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.message import Outgoing

TASKS_FILE = Path(__file__).with_name("signed_tasks.py")
KEYS = "first:" + "f" * 32
PICKLES = "application/x-python-serialize"
BROKERS = ["sqlite", "redis", "amqp"]
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]


class Explosive:
    """A pickle of it leaves a file where it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


class Attacker:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.app = App("attacker", broker=cluster.app.settings.broker, backend=cluster.app.settings.backend)
        self.exploded = cluster.home / "exploded"

    def send(self, *outgoing: Outgoing) -> None:
        self.app.producer.publish(outgoing)

    def call(self, name: str, *args: Any, queue: str = "legacy", immutable: bool = False) -> Signature[Any]:
        options = {"queue": queue}
        return self.app.signature(
            {"task": f"signed_tasks.{name}", "args": args, "options": options, "immutable": immutable}
        )

    def letters(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._cluster.umbel_json("dlq", "ls", "--limit", "1000")
        return found

    def pickled(self, value: Any) -> bytes:
        return pickle.dumps([value, Explosive(self.exploded)], protocol=4)

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: object) -> None:
        self.app.close()


@contextmanager
def attacked(broker: str, home: Path, **settings: Any) -> Iterator[tuple[Cluster, Attacker]]:
    signed = {"signing_keys": KEYS, "signing_cluster": "attacked", "lease_s": 2}
    with (
        place(broker, home, durable=False) as at,
        Cluster(home, TASKS_FILE, broker=at.broker, backend=at.backend, **signed, **settings) as cluster,
        Attacker(cluster) as attacker,
    ):
        yield cluster, attacker


def counted(cluster: Cluster, *names: str) -> int:
    """Of all workers; those that do not answer count nothing yet."""
    found = cluster.app.control.inspect(timeout=20, limit=len(cluster.workers)).stats() or {}
    return sum(one["umbel"]["counters"][name] for one in found.values() for name in names)


@pytest.mark.parametrize("broker", BROKERS)
def test_no_pickle_is_read_that_nobody_signed(broker: str, tmp_path: Path) -> None:
    """In the worker's main process, in its children, in `umbel task retry`."""
    with attacked(broker, tmp_path, accept_content="json,pickle") as (cluster, attacker):
        cluster.start_worker("w", "-c", "1", "-Q", "celery,legacy", accept_unsigned="legacy")
        request = attacker.pickled({"method": "ping", "arguments": {}})
        told = [Broadcast(REQUEST_EXCHANGE, "", request, b"{}")] * 3
        attacker.app.producer.broadcast(told, ttl_s=60.0)
        call = attacker.app.prepare("signed_tasks.note", [], {}, {"serializer": "json"}).outgoing.message
        bomb = replace(
            call, body=attacker.pickled([[], {}, {}]), content_type=PICKLES, content_encoding="binary"
        )
        attacker.send(Outgoing("celery", bomb), Outgoing("legacy", bomb))
        wait_until(lambda: counted(cluster, "unsigned") == 2, what="both tasks to be refused")
        # Where messages wait to be retried, too: nobody has verified what lies there.
        assert [one["reason"].partition(":")[0] for one in attacker.letters()] == ["unsigned"] * 2
        cluster.umbel("task", "retry", "--all", "-y", check=False)
        cluster.umbel("task", "retry", "--all", "-y", "--even-if-used", check=False)
        result = cluster.app.tasks["signed_tasks.note"].delay(str(tmp_path), "after")
        assert result.get(timeout=60) == "after"
        assert not attacker.exploded.exists()


@pytest.mark.parametrize("broker", BROKERS)
def test_an_unsigned_task_causes_nothing_where_a_signature_is_needed(broker: str, tmp_path: Path) -> None:
    """The guide's layout beside Celery: unsigned messages in a queue of their own, keys for all others."""
    with attacked(broker, tmp_path) as (cluster, attacker):
        cluster.start_worker("legacy", "-c", "1", "-Q", "legacy", accept_unsigned="legacy")
        cluster.start_worker("internal", "-c", "1", "-Q", "internal")
        home, tasks = str(tmp_path), cluster.app.tasks
        # The attacker's own app: it has the same tasks, and no keys.
        target = attacker.call("note", home, "evil", queue="internal", immutable=True)
        note = attacker.call("note", home, "legacy")
        attacks = [
            note.clone(link=[target]),
            chain(note.clone(), target),
            attacker.call("fails").clone(link_error=[target]),
            chord([note.clone(), note.clone()], target),
            *(
                attacker.call(name, "internal", home, "evil")
                for name in ("sends", "sends_in_a_thread", "moves", "replaces", "elects")
            ),
        ]
        for attack in attacks:
            attack.delay()
        wait_until(lambda: counted(cluster, "unsigned") == len(attacks), what="every follow-up to be refused")
        assert "evil" not in runs_of(home)
        assert runs_of(home).count("legacy") == 4
        # What the owner of the keys sends by the same ways runs.
        first, then = (tasks["signed_tasks.note"].si(home, word) for word in ("first", "trusted"))
        chain(first.set(queue="legacy"), then.set(queue="internal")).delay().get(timeout=60)
        tasks["signed_tasks.elects"].apply_async(["internal", home, "elected"], queue="internal")
        wait_until(lambda: "elected" in runs_of(home), what="the task that was elected")
        assert "trusted" in runs_of(home)
        reasons = {one["reason"] for one in attacker.letters()}
        assert all("whose message was unsigned" in one or "election" in one for one in reasons)


@pytest.mark.parametrize("broker", BROKERS)
def test_an_old_copy_of_what_ran_is_not_signed_again(broker: str, tmp_path: Path) -> None:
    """Not when it is requeued from the dead letters, nor when somebody puts it there.

    A worker whose window is a day runs what was signed 90 minutes ago; for the next one that is too old.
    """
    home = str(tmp_path)
    with attacked(broker, tmp_path) as (cluster, attacker):

        def signed(word: str, minutes_ago: float) -> Outgoing:
            call = cluster.app.prepare("signed_tasks.note", [home, word], {}, {}).outgoing
            signer = cluster.app.signing_cluster.signer()
            assert signer is not None
            return signer.sign_task(call, time() - 60 * minutes_ago)

        def requeue(*flags: str) -> None:
            cluster.umbel("dlq", "requeue", "--all", *flags)

        original, waited, ancient = signed("once", 90), signed("waited", 90), signed("ancient", 180)
        cluster.start_worker("first", "-c", "1")
        attacker.send(original)
        wait_until(lambda: runs_of(home) == ["once"], what="the original to run")
        cluster.stop_worker("first")
        cluster.start_worker("w", "-c", "1", signing_window_s=3600)
        attacker.send(original, waited, ancient)
        wait_until(lambda: counted(cluster, "stale", "replayed") == 3, what="all three to be refused")
        assert counted(cluster, "replayed") == 1
        put_among_the_dead_letters(attacker, original)
        requeue()  # two copies, what did not run, and what nobody can know
        wait_until(lambda: counted(cluster, "stale", "replayed") == 6, what="the others to be refused again")
        wait_until(lambda: runs_of(home) == ["once", "waited"], what="what certainly did not run")
        cluster.umbel("task", "retry", "--all", "-y", check=False)
        assert cluster.app.tasks["signed_tasks.note"].delay(home, "last").get(timeout=60) == "last"
        assert runs_of(home) == ["once", "waited", "last"]
        requeue("--even-if-used")  # somebody insists, who knows what they are
        insisted = {"ancient", "once"}
        wait_until(lambda: set(runs_of(home)[3:]) == insisted, what="what somebody insists on")


def put_among_the_dead_letters(attacker: Attacker, letter: Outgoing) -> None:
    """With the reason that a worker gives to what may be signed again."""

    async def bury() -> None:
        broker = open_broker(attacker.app.settings.for_broker())
        await broker.open()
        try:
            why = "stale: signed, or due, 90000 s ago, which is more than 'signing_window_s' (86400 s)"
            await broker.bury([Refused(letter, f"{why}; `umbel dlq requeue` signs it again")])
        finally:
            await broker.close()

    asyncio.run(bury())


def test_a_message_of_another_cluster_with_the_same_keys_does_not_run(tmp_path: Path) -> None:
    with attacked("sqlite", tmp_path) as (cluster, attacker):
        cluster.start_worker("w", "-c", "1")
        settings: dict[str, Any] = {"signing_keys": [KEYS], "signing_cluster": "staging"}
        staging = App("staging", broker=f"sqlite:///{tmp_path}/staging.db", **settings)
        with closing(staging):
            captured = staging.prepare("signed_tasks.note", [str(tmp_path), "evil"], {}, {}).outgoing
        attacker.send(captured)
        wait_until(lambda: counted(cluster, "forged") == 1, what="it to be refused")
        assert "signed for the cluster 'staging'" in attacker.letters()[0]["reason"]
        cluster.umbel("dlq", "requeue", "--all", "--even-if-used")
        wait_until(lambda: counted(cluster, "forged") == 2, what="it to be refused again")
        assert runs_of(str(tmp_path)) == []
