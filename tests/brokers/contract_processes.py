"""What every broker promises to several threads and processes at once, and across a fork.

Children are started as programs of their own, because that is what workers are; only the test
about forking forks. Each prints what it did as JSON on its standard output.
"""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.brokers.under_test import (
    SHORT_LEASE_S,
    BrokerUnderTest,
    outgoing,
    read_results,
    result,
    run,
    take,
    take_in_time,
    texts,
)
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CLAIMERS = 3
MESSAGES = 600


@contextmanager
def started(program: str, under_test: BrokerUnderTest, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the test."""
    command = [sys.executable, "-m", "tests.brokers.processes", program, under_test.settings.url, *args]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def in_a_fork(work: Callable[[], None]) -> int:
    """Run the work in a forked child; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class ProcessesContract:
    def test_a_producer_serves_eight_threads(self, under_test: BrokerUnderTest) -> None:
        producer = under_test.producer()
        together = threading.Barrier(8)

        def publish(thread: int) -> None:
            together.wait()
            for number in range(20):
                producer.publish(outgoing(f"{thread}.{number}"))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(publish, range(8)))

        async def scenario() -> list[str]:
            async with under_test.open() as broker:
                return texts((await take(broker, 1000)).deliveries)

        taken = run(scenario())
        assert sorted(taken) == sorted(f"{thread}.{number}" for thread in range(8) for number in range(20))
        for thread in range(8):  # each thread's own messages are in the order it sent them
            own = [text for text in taken if text.startswith(f"{thread}.")]
            assert own == [f"{thread}.{number}" for number in range(20)]

    def test_a_producer_and_a_backend_can_be_used_on_both_sides_of_a_fork(
        self, under_test: BrokerUnderTest
    ) -> None:
        producer, backend = under_test.producer(), under_test.backend()
        producer.publish(outgoing("before"))
        backend.store([result("before")])

        def child() -> None:
            assert backend.read(["before"])
            producer.publish(outgoing("child"))
            backend.store([result("child")])

        assert in_a_fork(child) == 0
        producer.publish(outgoing("parent"))
        assert set(read_results(backend, ["before", "child"])) == {"before", "child"}

        async def scenario() -> list[str]:
            async with under_test.open() as broker:
                return texts((await take(broker)).deliveries)

        assert run(scenario()) == ["before", "child", "parent"]

    def test_a_forked_child_can_publish_while_its_parent_ends_its_connection(
        self, under_test: BrokerUnderTest
    ) -> None:
        producer = under_test.producer()
        producer.publish(outgoing("before"))
        closed_read, closed_write = os.pipe()
        ready_read, ready_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                producer.publish(outgoing("first"))
                os.write(ready_write, b".")
                os.read(closed_read, 1)
                producer.publish(outgoing("second"))
            finally:
                os._exit(0)
        os.read(ready_read, 1)
        producer.close()
        os.write(closed_write, b".")
        os.waitpid(pid, 0)
        for end in (closed_read, closed_write, ready_read, ready_write):
            os.close(end)

        async def scenario() -> list[str]:
            async with under_test.open() as broker:
                return texts((await take(broker)).deliveries)

        assert run(scenario()) == ["before", "first", "second"]

    def test_forking_while_other_threads_publish_loses_nothing(self, under_test: BrokerUnderTest) -> None:
        producer = under_test.producer()
        stop = threading.Event()
        counts = Counter[str]()

        def publish(name: str) -> None:
            while not stop.is_set():
                producer.publish(outgoing(name))
                counts[name] += 1

        threads = [threading.Thread(target=publish, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(counts) == 2, what="both threads at work")
            for _ in range(10):
                assert in_a_fork(lambda: producer.publish(outgoing("child"))) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()

        async def scenario() -> Counter[str]:
            async with under_test.open() as broker:
                found = Counter[str]()
                while taken := (await take(broker, 100_000)).deliveries:  # a claim may be bounded by bytes
                    found.update(texts(taken))
                return found

        assert run(scenario()) == counts + Counter(child=10)

    def test_claimers_in_several_processes_share_the_queue_without_loss_or_double(
        self, under_test: BrokerUnderTest
    ) -> None:
        last = 9 if under_test.capabilities.priorities == "0 first" else 0
        producer = under_test.producer()
        with ExitStack() as stack:
            claimers = [
                stack.enter_context(started("claim", under_test, f"c{number}@here.1", "600"))
                for number in range(CLAIMERS)
            ]
            for first in range(0, MESSAGES, 50):
                batch = [str(number) for number in range(first, first + 50)]
                producer.publish(outgoing(*batch, priority=9 - last))
            # Each claimer ends at a message of its own, which comes after all others.
            producer.publish(outgoing(*["end"] * CLAIMERS, priority=last))
            taken = [text for claimer in claimers for text in json.loads(claimer.communicate(timeout=60)[0])]
            assert Counter(taken) == Counter(str(number) for number in range(MESSAGES))
            assert [claimer.returncode for claimer in claimers] == [0] * CLAIMERS

        async def scenario() -> None:
            async with under_test.open() as broker:
                assert not (await take(broker)).deliveries

        run(scenario())

    def test_messages_of_a_killed_process_return_within_its_lease(self, under_test: BrokerUnderTest) -> None:
        under_test.producer().publish(outgoing("a", "b", "c"))
        with started("hold", under_test, "dead@here.9", str(SHORT_LEASE_S)) as claimer:
            assert claimer.stdout is not None
            assert json.loads(claimer.stdout.readline()) == ["a", "b", "c"]

        async def scenario() -> None:
            async with under_test.open(lease_s=SHORT_LEASE_S) as broker:
                found = await take_in_time(broker, 3, what="the killed process's messages")
                assert texts(found) == ["a", "b", "c"]
                assert all(delivery.redelivered for delivery in found)

        run(scenario())

    def test_a_publisher_that_is_killed_leaves_whole_batches_only(self, under_test: BrokerUnderTest) -> None:
        with started("publish", under_test, "50") as publisher:
            assert publisher.stdout is not None
            for _ in range(5):
                publisher.stdout.readline()
            publisher.kill()
            confirmed = 5 + len(publisher.stdout.read().splitlines())

        async def scenario() -> None:
            async with under_test.open() as broker:
                found = texts((await take(broker, 1_000_000)).deliveries)
                batches = Counter(text.split(".")[0] for text in found)
                assert set(batches.values()) == {50}
                # Every batch that was confirmed is there, and at most the one under way beside.
                assert confirmed <= len(batches) <= confirmed + 1

        run(scenario())
