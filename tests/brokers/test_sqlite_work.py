"""What the embedded broker does for one more of something does not grow with how many there are.

Counted in steps of SQLite's virtual machine, so no clock and no other process on the machine is in it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.brokers.under_test import OWNER, QUEUE, outgoing, result
from umbel.brokers.interface import Ack, BrokerSettings, Bury, Delivery, Pause, Permit
from umbel.brokers.sqlite.chords import ChordStore, Part
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.wakeup import Bell
from umbel.protocol.delivery.limits import Pace, Terms
from umbel.wire.records import Revoke

FEW, MANY = 60, 1200
TIMES_MAX = 1.5  # an index of more rows may be deeper


class Counted:
    """A store whose steps can be counted."""

    def __init__(self, path: Path) -> None:
        self.store = ClusterStore(BrokerSettings(f"sqlite:///{path}", lease_s=1e6, failed_keep=100_000))
        self.chords = ChordStore(self.store)
        self.count = 0

    def steps(self, work: Callable[[], object]) -> int:
        def step() -> int:
            self.count += 1
            return 0

        with self.store.database.read() as db:
            db.set_progress_handler(step, 1)
        self.count = 0
        work()
        db.set_progress_handler(None, 0)
        return self.count

    def claim(self, count: int) -> list[Delivery]:
        return list(self.store.claim(OWNER, [QUEUE], count, 0).deliveries)


def chord_part(counted: Counted, size: int) -> int:
    counted.chords.start("g", 10**6)
    for number in range(size):
        counted.chords.add("g", Part(str(number), number, "SUCCESS", b"1"))
    return counted.steps(lambda: counted.chords.add("g", Part("one more", size, "SUCCESS", b"1")))


def revoke(counted: Counted, size: int) -> int:
    now = time.time()
    counted.store.revoke([Revoke(str(number), now, now + 1e6) for number in range(size)])
    return counted.steps(lambda: counted.store.revoke([Revoke("one more", now, now + 1e6)]))


def unique(counted: Counted, size: int) -> int:
    for number in range(size):
        counted.store.hold_unique(str(number), "task", ttl_s=1e6)
    return counted.steps(lambda: counted.store.hold_unique("one more", "task", ttl_s=1e6))


def slot_that_is_free(counted: Counted, size: int) -> int:
    """One of those that wait is called."""
    held = limited(counted, size, Terms(most=1))
    return counted.steps(lambda: counted.store.settle([Ack(held.tag)]))


def slot_that_is_free_beside_a_paused_queue(counted: Counted, size: int) -> int:
    counted.store.pause("another", Pause(0.0))
    return slot_that_is_free(counted, size)


def one_more_that_waits(counted: Counted, size: int) -> int:
    limited(counted, size, Terms(most=1))
    return one_more(counted, Terms(most=1))


def one_more_that_waits_for_a_pace(counted: Counted, size: int) -> int:
    terms = Terms(pace=Pace(1000.0, 0.0))
    limited(counted, size, terms)
    return one_more(counted, terms)


def one_more(counted: Counted, terms: Terms) -> int:
    counted.store.publish(outgoing("one more"))
    (delivery,) = counted.claim(1)
    return counted.steps(lambda: counted.store.permit([Permit(delivery.tag, "t", "bucket", terms)]))


def limited(counted: Counted, size: int, terms: Terms) -> Delivery:
    """So many wait; the one that may run."""
    counted.store.publish(outgoing(*map(str, range(size + 1))))
    claimed = counted.claim(size + 1)
    counted.store.permit([Permit(one.tag, "t", "bucket", terms) for one in claimed])
    return claimed[0]


def failure(counted: Counted, size: int) -> int:
    counted.store.publish(outgoing(*map(str, range(size + 1))))
    counted.store.settle([Ack(one.tag, keep="failed") for one in counted.claim(size)])
    (delivery,) = counted.claim(1)
    return counted.steps(lambda: counted.store.settle([Ack(delivery.tag, keep="failed")]))


def dead_letter(counted: Counted, size: int) -> int:
    counted.store.publish(outgoing(*map(str, range(size + 1))))
    counted.store.settle([Bury(one.tag, "no") for one in counted.claim(size)])
    (delivery,) = counted.claim(1)
    return counted.steps(lambda: counted.store.settle([Bury(delivery.tag, "no")]))


def claim_and_settle(counted: Counted, size: int) -> int:
    counted.store.publish(outgoing(*map(str, range(size))))
    counted.claim(1)  # files them

    def work() -> None:
        (delivery,) = counted.claim(1)
        counted.store.settle([Ack(delivery.tag, [result("a")])])

    return counted.steps(work)


def ready_in_one_queue(counted: Counted, size: int) -> int:
    """Many wait elsewhere."""
    counted.store.publish(outgoing("a"))
    counted.store.publish(outgoing(*map(str, range(size)), queue="other"))
    counted.claim(0)  # files them
    return counted.steps(lambda: counted.store.depths([QUEUE]))


def awaited_result(counted: Counted, size: int) -> int:
    """Somebody waits for very many."""
    bell = Bell(counted.store.database.path)
    assert bell.address is not None
    counted.store.watch_results([str(number) for number in range(size)], bell.address)
    steps = counted.steps(lambda: counted.store.store_results([result("7")]))
    bell.close()
    return steps


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[[], Counted]]:
    opened: list[Counted] = []

    def open_one() -> Counted:
        opened.append(Counted(tmp_path / f"{len(opened)}.db"))
        return opened[-1]

    yield open_one
    for one in opened:
        one.store.close()


@pytest.mark.parametrize(
    "work",
    [
        chord_part,
        revoke,
        unique,
        slot_that_is_free,
        slot_that_is_free_beside_a_paused_queue,
        one_more_that_waits,
        one_more_that_waits_for_a_pace,
        failure,
        dead_letter,
        claim_and_settle,
        ready_in_one_queue,
        awaited_result,
    ],
    ids=lambda work: work.__name__.replace("_", " "),
)
def test_one_more_costs_the_same_however_many_there_are(
    work: Callable[[Counted, int], int], stores: Callable[[], Counted]
) -> None:
    few, many = work(stores(), FEW), work(stores(), MANY)
    assert 0 < many <= TIMES_MAX * few, (few, many)


def test_a_chord_counts_its_parts_and_reads_them_once(stores: Callable[[], Counted]) -> None:
    """Also those that workers of version 0.3 add, which count by reading all."""
    counted = stores()
    counted.chords.start("g", 4)
    counted.chords.start("g", 4)  # its sender was redelivered
    counted.chords.grow("g", "grown")
    for name in ("a", "a", "b"):
        assert counted.chords.add("g", Part(name, 0, "SUCCESS", b"1")) is None
    with counted.store.database.write() as db:  # as version 0.3 does it
        for _ in range(2):
            db.execute("INSERT OR REPLACE INTO chord_parts VALUES ('g', 'old', 1, 'SUCCESS', x'31')")
    assert counted.chords.add("g", Part("grown", 2, "SUCCESS", b"1")) is None
    whole = counted.chords.add("g", Part("c", 3, "SUCCESS", b"1"))
    assert whole is not None and sorted(part.task_id for part in whole) == ["a", "b", "c", "grown", "old"]
    assert counted.chords.claim("g", "c")
    counted.chords.end("g", ())
    assert counted.chords.add("g", Part("c", 3, "SUCCESS", b"1")) is None


ADD = """
import sys
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.chords import ChordStore, Part
from umbel.brokers.sqlite.store import Store
url, name, place = sys.argv[1:]
found = ChordStore(Store(BrokerSettings(url))).add("g", Part(name, int(place), "SUCCESS", b"1"))
print(None if found is None else [part.task_id for part in found])
"""


def test_version_0_3_and_this_one_end_the_same_chord(
    stores: Callable[[], Counted], old_source: Path, tmp_path: Path
) -> None:
    counted = stores()
    counted.chords.start("g", 4)

    def by_old(name: str, place: int) -> str:
        command = [sys.executable, "-c", ADD, f"sqlite:///{tmp_path / '0.db'}", name, str(place)]
        environment = {**os.environ, "PYTHONPATH": str(old_source)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert by_old("a", 0) == "None"
    assert counted.chords.add("g", Part("b", 1, "SUCCESS", b"1")) is None
    assert [by_old("c", 2), by_old("c", 2)] == ["None", "None"]
    whole = counted.chords.add("g", Part("d", 3, "SUCCESS", b"1"))
    assert whole is not None and [part.task_id for part in whole] == ["a", "b", "c", "d"]
    assert by_old("d", 3) == str(["a", "b", "c", "d"])


def test_a_chord_that_began_before_parts_were_counted_ends(stores: Callable[[], Counted]) -> None:
    """A file of version 0.3."""
    counted = stores()
    counted.chords.start("g", 2)
    counted.chords.add("g", Part("a", 0, "SUCCESS", b"1"))
    with counted.store.database.write() as db:
        for name in ("chord_begins", "chord_part_ends", "chord_is_forgotten"):
            db.execute(f"DROP TRIGGER {name}")
        db.execute("DROP TABLE chord_progress")
        db.execute("DELETE FROM meta WHERE name = 'additions'")
    counted.store.close()
    whole = counted.chords.add("g", Part("b", 1, "SUCCESS", b"1"))
    assert whole is not None and [part.task_id for part in whole] == ["a", "b"]
