"""What is sent inside a block is written in the caller's transaction, and nowhere else."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from django.conf import UserSettingsHolder, global_settings
from django.conf import settings as django_settings
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.outbox.places import Place
from umbel import App, chain, chord, group
from umbel.errors import BrokerRefused, OutboxError

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization")
Opened = tuple[Any, Callable[[], object], Callable[[], object]]  # for app.outbox(), commit, rollback


@pytest.fixture(autouse=True)
def _django_is_configured() -> Iterator[None]:
    """For a test, as a process has it for all its life: other tests run projects of their own."""
    kept = dict(vars(django_settings))
    vars(django_settings)["_wrapped"] = UserSettingsHolder(global_settings)
    yield
    vars(django_settings).clear()
    vars(django_settings).update(kept)


def ready(app: App) -> int:
    """How many messages wait in the broker."""

    async def ask() -> int:
        from umbel.brokers.registry import open_broker

        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            return sum(one.ready for one in (await broker.queues()).values())
        finally:
            await broker.close()

    return asyncio.run(ask())


@contextmanager
def by_driver(place: Place) -> Iterator[Opened]:
    with place.connection() as connection:
        yield connection, connection.commit, connection.rollback


def engine_for(place: Place) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))


@contextmanager
def by_alchemy_connection(place: Place) -> Iterator[Opened]:
    engine = engine_for(place)
    with engine.connect() as connection:
        yield connection, connection.commit, connection.rollback
    engine.dispose()


@contextmanager
def by_session(place: Place) -> Iterator[Opened]:
    engine = engine_for(place)
    with Session(engine) as session:
        yield session, session.commit, session.rollback
    engine.dispose()


@contextmanager
def by_scoped_session(place: Place) -> Iterator[Opened]:
    engine = engine_for(place)
    session = scoped_session(sessionmaker(engine))
    yield session, session.commit, session.rollback
    session.remove()
    engine.dispose()


@contextmanager
def by_django(place: Place) -> Iterator[Opened]:
    connection = django_connection(place)
    connection.set_autocommit(False)
    yield connection, connection.commit, connection.rollback
    connection.close()


def django_connection(place: Place) -> Any:
    from django.db.utils import ConnectionHandler

    server = place.url.rpartition(":")[2].partition("/")
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": place.url.removeprefix("sqlite:///")}
    postgresql = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": server[2],
        "HOST": "127.0.0.1",
        "PORT": server[0],
        "USER": "umbel",
    }
    return ConnectionHandler({"default": sqlite if place.is_sqlite else postgresql})["default"]


KINDS = [by_driver, by_alchemy_connection, by_session, by_scoped_session, by_django]


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_written_if_and_only_if_the_transaction_commits(
    app: App, place: Place, kind: Callable[[Place], Any]
) -> None:
    pay = app.tasks["shop.pay"]
    with kind(place) as (connection, commit, rollback):
        with app.outbox(connection):
            pay.delay(1)
        rollback()
        assert place.ids() == []
        with app.outbox(connection):
            sent = [pay.delay(2).id, pay.apply_async((3,), queue="slow").id]
        assert place.ids() == []
        commit()
    assert place.ids() == sent
    assert [one.queue for one in place.written()] == ["celery", "slow"]
    assert ready(app) == 0


def test_a_reserved_queue_is_refused_when_it_is_sent_and_not_when_it_is_published(
    place: Place, tmp_path: Path
) -> None:
    """The broker need not be there: its names are known."""
    app = App("shop", broker="redis://127.0.0.1:1/0", backend=f"sqlite:///{tmp_path}/results.db")
    with place.connection() as connection:
        with app.outbox(connection):
            with pytest.raises(BrokerRefused, match=r"'umbel\.dead' is reserved"):
                app.send_task("shop.pay", (1,), queue="umbel.dead")
            with pytest.raises(BrokerRefused, match=r"'umbel\.dead' is reserved"):
                asyncio.run(app.asend_task("shop.pay", (1,), queue="umbel.dead"))
            sent = app.send_task("shop.pay", (2,), queue="slow").id
        connection.commit()
    assert place.ids() == [sent]


def test_everything_that_sends_goes_there_in_order(app: App, place: Place) -> None:
    pay = app.tasks["shop.pay"]
    with place.connection() as connection:
        with app.outbox(connection):
            first = [pay.delay(1).id, app.send_task("elsewhere.ship", (2,)).id]
            together = [one.id for one in app.send_many([pay.s(3), pay.s(4)])]
            chained = chain(pay.si(5), pay.si(6)).apply_async()
            grouped = group(pay.s(7), pay.s(8)).apply_async()
            chord([pay.s(9), pay.s(10)])(pay.si(11))
            awaited = asyncio.run(pay.aapply_async((12,))).id
        connection.commit()
    ids = place.ids()
    assert ids[:4] == [*first, *together]
    assert chained.parent is not None and ids[4] == chained.parent.id
    assert ids[5:7] == [one.id for one in grouped.results] and ids[-1] == awaited
    assert len(ids) == 10 and ready(app) == 0


def test_awaited_connections(app: App, place: Place) -> None:
    if place.is_sqlite:
        pytest.skip("SQLite has no awaited connection among our libraries")
    pay = app.tasks["shop.pay"]

    async def scenario() -> list[str]:
        sent = []
        async with await psycopg.AsyncConnection.connect(place.url) as connection:
            async with app.outbox(connection):
                await pay.adelay(0)
                await connection.rollback()
                sent.append((await pay.adelay(1)).id)
            with pytest.raises(OutboxError, match="async with"), app.outbox(connection):
                pass
            async with app.outbox(connection):
                with pytest.raises(OutboxError, match=r"await task\.adelay"):
                    pay.delay(2)
                assert await app.asend_many([]) == []
        engine = create_async_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
        async with AsyncSession(engine) as session, session.begin(), app.outbox(session):
            sent.append((await pay.adelay(3)).id)
        async with engine.begin() as alchemys, app.outbox(alchemys):
            sent += [one.id for one in await app.asend_many([pay.s(4), pay.s(5)])]
        await engine.dispose()
        await app.aclose()
        return sent

    sent = asyncio.run(scenario())
    assert place.ids() == sent


def test_a_block_belongs_to_its_context_and_its_app(app: App, place: Place, tmp_path: Path) -> None:
    pay = app.tasks["shop.pay"]
    other = App("other", broker=f"sqlite:///{tmp_path}/other.db")
    with place.connection() as connection:
        with app.outbox(connection):
            beside = threading.Thread(target=pay.delay, args=(1,))
            beside.start()
            beside.join()
            other.send_task("t")
            with other.outbox(connection):
                inner = [other.send_task("t").id, pay.delay(2).id]
            inner.append(pay.delay(3).id)
        pay.delay(4)
        connection.commit()
    assert place.ids() == inner
    assert (ready(app), ready(other)) == (2, 1)
    other.close()


def test_a_block_that_has_ended_holds_nothing_back(app: App, place: Place) -> None:
    pay = app.tasks["shop.pay"]

    async def scenario(connection: Any) -> None:
        over = asyncio.Event()

        async def later() -> None:
            await over.wait()
            await pay.adelay(1)

        with app.outbox(connection):
            started_inside = asyncio.create_task(later())
            await asyncio.wait([started_inside], timeout=0)
        over.set()
        await started_inside
        await app.aclose()

    with place.connection() as connection:
        asyncio.run(scenario(connection))
        connection.commit()
    assert (place.ids(), ready(app)) == ([], 1)


def test_eager_tasks_run_at_once(app: App, place: Place) -> None:
    with place.connection() as connection, app.eager(), app.outbox(connection):
        assert app.tasks["shop.pay"].delay(5).get() == 5
        connection.commit()
    assert place.ids() == []


def test_what_cannot_be_done_is_refused_with_the_remedy(app: App, place: Place) -> None:
    pay = app.tasks["shop.pay"]
    with place.connection() as connection:
        with app.outbox(connection):
            with pytest.raises(OutboxError, match="already open here"), app.outbox(connection):
                pass
            with pytest.raises(OutboxError, match="Send it after the commit"):
                pay.apply_async((1,), unique_for=5.0)
        with (
            pytest.raises(OutboxError, match=r"cannot write through .*Cursor"),
            app.outbox(connection.cursor()),
        ):
            pass
    with pytest.raises(OutboxError, match="closed connection"), app.outbox(connection):
        pass
    with pytest.raises(OutboxError, match=r"cannot write through sqlalchemy.*Engine.*pass a connection"):
        app.outbox(engine := engine_for(place))
    with engine.connect() as closed:
        pass
    engine.dispose()
    with pytest.raises(OutboxError, match="closed connection"), app.outbox(closed):
        pass
    assert place.ids() == []


def test_a_connection_without_a_transaction_is_refused(app: App, place: Place) -> None:
    pay = app.tasks["shop.pay"]
    with place.connection() as connection:
        begins = "BEGIN"
        if place.is_sqlite:
            connection.isolation_level = None
        else:
            connection.autocommit = True
        with app.outbox(connection):
            with pytest.raises(OutboxError, match="no transaction is open"):
                pay.delay(1)
            connection.execute(begins)
            sent = pay.delay(2)
            connection.execute("COMMIT")
    django = django_connection(place)
    with app.outbox(django), pytest.raises(OutboxError, match=r"transaction\.atomic"):
        pay.delay(3)
    django.close()
    engine = engine_for(place)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as itself,
        app.outbox(itself),
        pytest.raises(OutboxError, match="no transaction is open"),
    ):
        pay.delay(4)
    engine.dispose()
    assert place.ids() == [sent.id]


def test_a_class_of_ones_own_is_known_by_what_it_comes_from(app: App, place: Place) -> None:
    class Lite(sqlite3.Connection):
        pass

    class Post(psycopg.Connection[Any]):
        pass

    path = place.url.removeprefix("sqlite:///")
    own: Any = (
        sqlite3.connect(path, factory=Lite, isolation_level=None)
        if place.is_sqlite
        else Post.connect(place.url, autocommit=True)
    )
    with closing(own), app.outbox(own), pytest.raises(OutboxError, match="no transaction is open"):
        app.tasks["shop.pay"].delay(1)
    assert place.ids() == []


class Strange:
    """A connection of a library that we know nothing of, as asyncpg's and pg8000's are."""

    def __init__(self, path: str) -> None:
        vars(self)["made"] = sqlite3.connect(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["made"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["made"], name, value)


def test_sqlalchemy_says_itself_that_it_commits_at_once(app: App, tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/shop.db")
    place.create()
    pay = app.tasks["shop.pay"]

    def engine(**options: Any) -> sqlalchemy.Engine:
        return sqlalchemy.create_engine(place.url, creator=lambda: Strange(f"{tmp_path}/shop.db"), **options)

    plain, from_the_start = engine(), engine(isolation_level="AUTOCOMMIT")
    for engine_or_view in (plain.execution_options(isolation_level="AUTOCOMMIT"), from_the_start):
        with (
            Session(engine_or_view) as session,
            app.outbox(session),
            pytest.raises(OutboxError, match="no transaction is open"),
        ):
            pay.delay(1)
    sent = []
    for one in (plain, from_the_start.execution_options(isolation_level="SERIALIZABLE")):
        with one.begin() as connection, app.outbox(connection):
            sent.append(pay.delay(2).id)
    plain.dispose()
    from_the_start.dispose()
    assert place.ids() == sent


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_table_is_named_with_the_command_that_makes_it(
    app: App, place: Place, kind: Callable[[Place], Any]
) -> None:
    place.run("DROP TABLE umbel_outbox")
    with kind(place) as (connection, _, rollback):
        with (
            app.outbox(connection),
            pytest.raises(OutboxError, match=r"umbel outbox create.*umbel outbox sql"),
        ):
            app.tasks["shop.pay"].delay(1)
        rollback()


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_the_database_stay_as_they_are(
    app: App, place: Place, kind: Callable[[Place], Any]
) -> None:
    place.run("DROP TABLE umbel_outbox")
    place.run("CREATE TABLE umbel_outbox (id int)")
    with kind(place) as (connection, _, rollback):
        with app.outbox(connection), pytest.raises(Exception, match="task_id") as raised:
            app.tasks["shop.pay"].delay(1)
        rollback()
    assert not isinstance(raised.value, OutboxError)
    assert raised.value.__cause__ is not raised.value
