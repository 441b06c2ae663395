"""Writers and relays that are killed at one step each, in processes of their own: DATABASE BROKER.

Every transaction writes its tasks' ids into the table `orders` as well, so that what must be published is
known to the database alone.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from traceback import print_exception
from typing import NoReturn

from tests.outbox.places import Place
from umbel import App
from umbel.brokers.interface import Attempt
from umbel.brokers.registry import open_async_producer
from umbel.outbox.relay import Relay
from umbel.outbox.table import Problem, StoredRow
from umbel.pools.guard import Raised, call_guarded
from umbel.wire.message import Outgoing

TASKS = 3  # of a transaction
WRITER_STEPS = ("written", "rolled back", "committed")
RELAY_STEPS = ("fetched", "publishing", "published", "settled")


def main(url: str, broker: str, rounds: int) -> None:
    place = Place(url)
    for number in range(rounds):
        for step in WRITER_STEPS:
            dies(partial(write, place, broker, f"{number} {step}", dies_at=step))
        for step in RELAY_STEPS:
            dies(partial(lead, place, broker, f"{number} {step}", dies_at=step))
    survives(lambda: asyncio.run(relay_all(place, App("shop", broker=broker), "")))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies(work: Callable[[], None]) -> None:
    assert os.waitstatus_to_exitcode(_forked(work)) == -signal.SIGKILL


def survives(work: Callable[[], None]) -> None:
    assert os.waitstatus_to_exitcode(_forked(work)) == 0


def _forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work)
    return os.waitpid(pid, 0)[1]


def _work_and_exit(work: Callable[[], None]) -> NoReturn:
    happened = call_guarded(work)
    if isinstance(happened, Raised):
        print_exception(happened.error)
    os._exit(isinstance(happened, Raised))


def write(place: Place, broker: str, transaction: str, dies_at: str = "") -> None:
    app = App("shop", broker=broker)
    with place.connection() as connection:
        with app.outbox(connection):
            for number in range(TASKS):
                task_id = app.send_task("shop.pay", (transaction, number)).id
                order = (transaction, number, task_id)
                mark = "?" if place.is_sqlite else "%s"
                connection.execute(f"INSERT INTO orders VALUES ({mark}, {mark}, {mark})", order)
        if dies_at == "written":
            die()
        if dies_at == "rolled back":
            connection.rollback()
            die()
        connection.commit()
        if dies_at == "committed":
            die()


def lead(place: Place, broker: str, transaction: str, dies_at: str) -> None:
    write(place, broker, transaction)
    asyncio.run(relay_all(place, App("shop", broker=broker), dies_at))


async def relay_all(place: Place, app: App, dies_at: str) -> None:
    database, producer = place.database(), open_async_producer(app.settings.for_broker())
    publish, fetch, settle = producer.publish, database.fetch, database.settle

    async def publish_or_die(batch: Sequence[Outgoing], attempt: Attempt) -> None:
        if dies_at == "publishing":
            sending = asyncio.create_task(publish(batch, attempt))
            await asyncio.wait([sending], timeout=0)
            die()
            await sending
        await publish(batch, attempt)
        if dies_at == "published":
            die()

    def fetch_or_die(rows_max: int = 500, bytes_max: int = 2**20) -> list[StoredRow]:
        found = fetch(rows_max, bytes_max)
        if dies_at == "fetched":
            die()
        return found

    def settle_or_die(published: Sequence[int], problems: Sequence[Problem] = ()) -> None:
        settle(published, problems)
        if dies_at == "settled":
            die()

    producer.publish = publish_or_die  # type: ignore[method-assign]
    database.fetch = fetch_or_die  # type: ignore[method-assign]
    database.settle = settle_or_die  # type: ignore[method-assign]
    relay = Relay(lambda: database, producer, Alone(), poll_s=0.05)
    while await relay.round():
        pass


class Alone:
    def still_mine(self) -> bool:
        return True

    def database_answered(self, error: Exception | None) -> None: ...
    def broker_answered(self, error: Exception | None) -> None: ...
    def published(self, count: int, set_aside: int) -> None: ...


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
