"""What becomes of messages that are sent while the broker is away, on every broker."""

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.app.test_tracer import job_of
from tests.brokers.under_test import run
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer, redis_server
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel import App, Reject, Retry
from umbel.app.running.tracer import Tracer
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import AccessRefused, BrokerUnavailable, BufferFull, MayHaveArrived

__all__ = ["redis_server"]  # fixture


@dataclass(frozen=True)
class Place:
    """A broker that can be sent away: `url` fails then, `direct` does not."""

    url: str
    direct: str
    go_away: Callable[[], None]
    come_back: Callable[[], None]
    connect_timeout_s: float = 4.0

    def waiting(self) -> list[str]:
        """The tasks in the default queue, read past whatever is in the way."""

        async def peek() -> list[str]:
            broker = open_broker(BrokerSettings(self.direct))
            await broker.open()
            found = await broker.peek("celery", 100)
            await broker.close()
            return [one.message.correlation_id for one in found]

        return run(peek())


@pytest.fixture(params=["sqlite", "redis", "amqp"])
def place(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> Iterator[Place]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/umbel.db"
        App("made", broker=url).send_task("first", task_id="first")
        with closing(sqlite3.connect(tmp_path / "umbel.db", isolation_level=None)) as db:
            yield Place(
                url,
                url,
                lambda: void(db.execute("BEGIN IMMEDIATE")),
                lambda: void(db.execute("ROLLBACK")),
                connect_timeout_s=0.1,
            )
        return
    if request.param == "redis":
        redis_server.ask("FLUSHALL")
        way, direct = Way(redis_server.port), redis_server.url
        url = f"redis://127.0.0.1:{way.port}/0"
    else:
        server = shared_server()
        way, vhost = Way(server.port), server.new_vhost()
        url, direct = f"amqp://guest:guest@127.0.0.1:{way.port}/{vhost}", server.url(vhost)
    with closing(App("made", broker=url, backend="sqlite:///unused.db")) as app:
        app.send_task("first", task_id="first")
    yield Place(url, direct, way.close, way.open)
    way.end()


def void(_: object) -> None:
    return None


@pytest.fixture
def make_app(place: Place, tmp_path: Path) -> Iterator[Callable[..., App]]:
    made: list[App] = []

    def make(**settings: Any) -> App:
        app = App(
            "shop",
            broker=place.url,
            backend=f"sqlite:///{tmp_path}/results.db",
            connect_timeout_s=place.connect_timeout_s,
            **settings,
        )
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


def test_a_sender_is_told_when_its_time_is_over(place: Place, make_app: Callable[..., App]) -> None:
    app = make_app(publish_timeout_s=0.0)
    app.send_task("t", task_id="before")
    place.go_away()
    for timeout_s in (0.0, 0.05):
        with pytest.raises(BrokerUnavailable):
            make_app(publish_timeout_s=timeout_s).send_task("t", task_id="lost")
    with pytest.raises(BrokerUnavailable):
        app.send_task("t", task_id="lost")
    place.come_back()
    app.send_task("t", task_id="after")
    assert place.waiting() == ["first", "before", "after"]


def test_a_sender_waits_for_the_broker_to_come_back(
    place: Place, make_app: Callable[..., App], caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(publish_timeout_s=60.0)
    app.send_task("t", task_id="before")
    place.go_away()
    with caplog.at_level(logging.WARNING, "umbel.publishing"):
        sending = threading.Thread(target=lambda: app.send_task("t", task_id="waited"))
        sending.start()
        wait_until(lambda: "broker unavailable" in caplog.text, what="a sender that waits")
    place.come_back()
    sending.join()
    assert place.waiting() == ["first", "before", "waited"]


@pytest.fixture
def tracer(make_app: Callable[..., App]) -> Iterator[Tracer]:
    made = Tracer(make_app(publish_timeout_s=0.0, publish_buffer_max=3), hostname="w@host")
    yield made
    made.close()


@pytest.mark.parametrize(
    "ending", [None, ValueError("why"), Retry(), Reject("no"), Reject("no", requeue=True)]
)
def test_what_a_task_sends_meanwhile_goes_out_with_its_end(
    place: Place, tracer: Tracer, ending: Exception | None
) -> None:
    app = tracer._app
    assert isinstance(app, App)

    @app.task
    def parent() -> None:
        for number in range(3):
            app.send_task("child", task_id=f"child {number}")
        if ending is not None:
            raise ending

    job = job_of(app, parent.name)
    place.go_away()
    outcome = tracer(job)
    sent = [one.message.correlation_id for one in outcome.follow_ups]
    assert sent[:3] == ["child 0", "child 1", "child 2"]
    place.come_back()
    assert place.waiting() == ["first"]


def test_what_may_have_arrived_goes_out_as_redelivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ may still read what a task's process wrote, when the worker sends it again."""
    app = App("shop", broker=f"sqlite:///{tmp_path}/umbel.db", publish_timeout_s=0.0)

    @app.task
    def parent() -> None:
        for task_id, error in (("buffered", BrokerUnavailable), ("written", MayHaveArrived)):
            monkeypatch.setattr(app.producer, "publish", raises(error("the broker is away")))
            parent.request.try_again_at = 0.0
            app.send_task("child", task_id=task_id)
        parent.request.try_again_at = inf
        app.send_task("child", task_id="not tried")

    with closing(app), closing(Tracer(app, hostname="w@host")) as tracer:
        sent = tracer(job_of(app, parent.name)).follow_ups
    # With the second attempt both were written.
    assert [(child.message.correlation_id, child.redelivered) for child in sent] == [
        ("buffered", True),
        ("written", True),
        ("not tried", False),
    ]


def raises(error: Exception) -> Callable[..., None]:
    def raise_it(*_given: object) -> None:
        raise error

    return raise_it


def test_what_a_task_sent_meanwhile_goes_out_when_the_broker_is_back(place: Place, tracer: Tracer) -> None:
    app = tracer._app
    assert isinstance(app, App)

    @app.task
    def parent() -> None:
        request = parent.request
        place.go_away()
        app.send_task("child", task_id="kept")
        assert len(request.unsent) == 1
        place.come_back()
        wait_until(lambda: tried(request), what="messages that are out")

    def tried(request: Any) -> bool:
        request.try_again_at = 0.0
        app.send_task("child", task_id="later")
        return not request.unsent

    outcome = tracer(job_of(app, parent.name))
    assert (outcome.kind, outcome.summary, list(outcome.follow_ups)) == ("success", "None", [])
    assert place.waiting()[:3] == ["first", "kept", "later"]


def test_a_task_that_keeps_too_much_is_told(place: Place, tracer: Tracer) -> None:
    app = tracer._app
    assert isinstance(app, App)

    @app.task
    def parent() -> None:
        for number in range(4):
            app.send_task("child", task_id=f"child {number}")

    job = job_of(app, parent.name)
    place.go_away()
    outcome = tracer(job)
    place.come_back()
    assert (outcome.kind, len(outcome.follow_ups)) == ("failure", 3)
    assert BufferFull.__name__ in outcome.summary and "'publish_buffer_max'" in outcome.summary


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_wrong_password_is_not_waited_for(broker: str, redis_server: RedisServer) -> None:
    server = shared_server()
    urls = {
        "redis": f"redis://:wrong@127.0.0.1:{redis_server.port}/0",
        "amqp": f"amqp://guest:wrong@127.0.0.1:{server.port}//",
    }
    with (
        closing(App("shop", broker=urls[broker], backend="sqlite:///x.db", publish_timeout_s=1e9)) as app,
        pytest.raises(AccessRefused),
    ):
        app.send_task("t")
