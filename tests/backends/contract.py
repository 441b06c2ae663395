"""What every result store promises. A store's own test file gives the class a `stores` fixture."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.brokers.under_test import LONG_S, result, run
from tests.waiting import wait_until
from umbel.backends.interface import Backend
from umbel.wire.message import StoredResult

Stores = Callable[..., Backend]
"""Opens one more backend on the same store; keywords change its settings."""


class BackendContract:
    def test_a_stored_result_can_be_read_by_everyone(self, stores: Stores) -> None:
        one, other = stores(), stores()
        stored = result("a", "FAILURE", "ä")
        one.store([stored, result("b")])
        assert other.read(["a", "b", "unknown"]) == {"a": stored, "b": result("b")}

    def test_a_later_state_replaces_an_earlier_one_but_the_first_success_stays(self, stores: Stores) -> None:
        backend = stores()
        for status in ("STARTED", "RETRY", "FAILURE", "SUCCESS", "FAILURE", "STARTED"):
            backend.store([result("a", status, status)])
        assert backend.read(["a"]) == {"a": result("a", "SUCCESS", "SUCCESS")}

    def test_a_forgotten_result_is_gone(self, stores: Stores) -> None:
        backend = stores()
        backend.store([result("a"), result("b")])
        backend.forget(["a", "unknown"])
        assert set(backend.read(["a", "b"])) == {"b"}

    def test_a_result_is_gone_after_its_retention(self, stores: Stores) -> None:
        backend = stores(result_expires_s=0.05)
        backend.store([result("a", value="first")])
        wait_until(lambda: not backend.read(["a"]), what="the end of the retention")
        stores().store([result("a", value="second")])  # a new life: nothing of the old one counts
        assert stores().read(["a"]) == {"a": result("a", value="second")}

    def test_waiting_ends_with_the_first_final_state(self, stores: Stores) -> None:
        waiter, worker = stores(), stores()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(waiter.wait, ["a", "b"], LONG_S)
            worker.store([result("a", "STARTED"), result("other")])
            worker.store([result("b", "FAILURE")])
            assert waiting.result(LONG_S / 2) == {"b": result("b", "FAILURE")}

    def test_of_many_each_is_handed_over_once_in_whatever_portions_they_end(self, stores: Stores) -> None:
        waiter, worker = stores(), stores()
        names = [str(number) for number in range(40)]
        worker.store([result("0"), result("1", "STARTED")])
        handed: list[str] = []

        def take(found: Mapping[str, StoredResult]) -> bool:
            handed.extend(found)
            return False

        def store_the_rest() -> None:
            for first in (1, 3, 20):
                last = {1: 3, 3: 20, 20: 40}[first]
                worker.store([result(name, "FAILURE") for name in names[first:last]])

        async def scenario() -> Mapping[str, StoredResult]:
            return await waiter.wait_async(names, LONG_S, take)

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(waiter.wait, names, LONG_S, take)
            store_the_rest()
            assert set(waiting.result(LONG_S / 2)) == set(names)
        assert sorted(handed) == sorted(names)
        handed.clear()
        assert set(run(scenario())) == set(names)
        assert sorted(handed) == sorted(names)

    def test_who_has_enough_waits_for_no_more(self, stores: Stores) -> None:
        waiter, worker = stores(), stores()
        worker.store([result("a", "FAILURE")])

        def take(found: Mapping[str, StoredResult]) -> bool:
            return any(one.status == "FAILURE" for one in found.values())

        async def scenario() -> Mapping[str, StoredResult]:
            return await waiter.wait_async(["a", "never"], LONG_S, take)

        assert set(waiter.wait(["a", "never"], LONG_S, take)) == {"a"}
        assert set(run(scenario())) == {"a"}
        assert waiter.wait(["never"], 0.05, take) == {}

    def test_waiting_for_what_is_there_ends_at_once_and_without_a_time_out(self, stores: Stores) -> None:
        backend = stores()
        backend.store([result("a"), result("b", "REVOKED")])
        assert set(backend.wait(["a", "b", "c"], None)) == {"a", "b"}
        assert backend.wait([], None) == {}

    def test_waiting_ends_at_the_time_out_with_nothing(self, stores: Stores) -> None:
        backend = stores()
        backend.store([result("a", "STARTED")])
        assert backend.wait(["a"], 0.05) == {}
        assert backend.wait(["a"], 0.0) == {}

    def test_eight_threads_can_wait_at_once(self, stores: Stores) -> None:
        waiter, worker = stores(), stores()
        with ThreadPoolExecutor(8) as threads:
            waiting = [threads.submit(waiter.wait, [str(number)], LONG_S) for number in range(8)]
            worker.store([result(str(number)) for number in range(8)])
            found = [one.result(LONG_S / 2) for one in waiting]
        assert [list(one) for one in found] == [[str(number)] for number in range(8)]

    def test_waiting_on_the_event_loop_does_not_block_it(self, stores: Stores) -> None:
        waiter, worker = stores(), stores()

        async def scenario() -> None:
            waiting = [asyncio.create_task(waiter.wait_async([str(number)], LONG_S)) for number in range(3)]
            await asyncio.to_thread(worker.store, [result("0"), result("2", "FAILURE")])
            async with asyncio.timeout(LONG_S / 2):
                assert set(await waiting[0]) == {"0"}
                assert set(await waiting[2]) == {"2"}
            assert not waiting[1].done()
            waiting[1].cancel()
            await asyncio.wait([waiting[1]])
            assert await waiter.wait_async(["1"], 0.05) == {}
            assert await waiter.wait_async([], None) == {}

        run(scenario())

    def test_a_cancelled_wait_leaves_no_thread_behind(self, stores: Stores) -> None:
        backend = stores()

        async def scenario() -> None:
            await backend.wait_async(["a"], 0.0)  # the thread in which files are read stays
            before = threading.active_count()
            waiting = asyncio.create_task(backend.wait_async(["a"], None))
            await asyncio.wait([waiting], timeout=0.05)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert threading.active_count() == before

        run(scenario())

    def test_reading_on_the_event_loop_finds_what_is_there(self, stores: Stores) -> None:
        backend = stores()
        backend.store([result("a"), result("b", "FAILURE")])

        async def scenario() -> None:
            found = await backend.read_async(["a", "b", "c", "a"])
            assert {task_id: one.status for task_id, one in found.items()} == {
                "a": "SUCCESS",
                "b": "FAILURE",
            }
            assert await backend.read_async([]) == {}

        run(scenario())

    def test_waiting_again_and_again_loses_no_wake_up(self, stores: Stores) -> None:
        waiter, worker = stores(), stores()

        async def scenario() -> None:
            async with asyncio.timeout(LONG_S / 2):
                for number in range(30):
                    waiting = asyncio.create_task(waiter.wait_async([str(number)], None))
                    await asyncio.to_thread(worker.store, [result(str(number))])
                    assert set(await waiting) == {str(number)}

        run(scenario())


def closing(opened: list[Backend], open_one: Callable[..., Backend]) -> Stores:
    def stores(**changes: Any) -> Backend:
        backend = open_one(**changes)
        opened.append(backend)
        return backend

    return stores
