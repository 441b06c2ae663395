"""What every broker promises about the keys of unique tasks, or refuses with its reason."""

from concurrent.futures import ThreadPoolExecutor

from tests.brokers.under_test import LONG_S, BrokerUnderTest, needs, run
from tests.waiting import wait_until

KEY = "a" * 64
SHORT_S = 0.2


class UniqueContract:
    @needs("unique")
    def test_a_key_is_held_by_the_first_until_that_one_gives_it_back(
        self, under_test: BrokerUnderTest
    ) -> None:
        one, other = under_test.producer(), under_test.producer()
        assert one.hold_unique(KEY, "first", ttl_s=LONG_S) == "first"
        assert other.hold_unique(KEY, "second", ttl_s=LONG_S) == "first"
        assert one.hold_unique(KEY, "first", ttl_s=LONG_S) == "first"  # asked again after a broken line
        assert one.hold_unique("b" * 64, "second", ttl_s=LONG_S) == "second"
        other.release_unique([(KEY, "second")])  # not its own
        assert other.hold_unique(KEY, "second", ttl_s=LONG_S) == "first"
        one.release_unique([(KEY, "first"), ("c" * 64, "nobody")])
        assert other.hold_unique(KEY, "second", ttl_s=LONG_S) == "second"

    @needs("unique")
    def test_a_worker_gives_keys_back(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.coordination.release_unique([(KEY, "first"), ("b" * 64, "other")])

        producer = under_test.producer()
        producer.hold_unique(KEY, "first", ttl_s=LONG_S)
        run(scenario())
        assert producer.hold_unique(KEY, "second", ttl_s=LONG_S) == "second"

    @needs("unique")
    def test_a_key_is_free_when_its_time_is_over_and_the_late_one_cannot_free_it(
        self, under_test: BrokerUnderTest
    ) -> None:
        producer = under_test.producer()
        assert producer.hold_unique(KEY, "first", ttl_s=SHORT_S) == "first"
        wait_until(
            lambda: producer.hold_unique(KEY, "second", ttl_s=LONG_S) == "second", what="the end of its time"
        )
        producer.release_unique([(KEY, "first")])
        assert producer.hold_unique(KEY, "third", ttl_s=LONG_S) == "second"

    @needs("unique")
    def test_of_many_that_ask_at_once_one_gets_the_key_and_all_hear_which(
        self, under_test: BrokerUnderTest
    ) -> None:
        producers = [under_test.producer() for _ in range(4)]

        def ask(number: int) -> str:
            return producers[number % 4].hold_unique(KEY, f"task {number}", ttl_s=LONG_S)

        with ThreadPoolExecutor(8) as threads:
            holders = set(threads.map(ask, range(40)))
        assert len(holders) == 1
