import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import Any

import pytest

from umbel import App
from umbel.app.sending.preparation import origin
from umbel.brokers.registry import open_broker
from umbel.errors import StorageFull
from umbel.wire.event import decode_events

RECORDER = "tests"


def told(app: App, *, register: bool = False) -> list[dict[str, Any]]:
    """What the durable log holds for a recorder."""

    async def read() -> list[dict[str, Any]]:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            if register:
                await broker.register_recorder(RECORDER)
                return []
            entries = await broker.read_events(RECORDER, 1000)
            return [event for one in entries for event in decode_events(one.body)]
        finally:
            await broker.close()

    return asyncio.run(read())


def telling_app(tmp_path: Path, **settings: Any) -> App:
    app = App("tests", broker=f"sqlite:///{tmp_path}/umbel.db", **settings)
    told(app, register=True)
    return app


def test_sending_is_told_when_asked_for(tmp_path: Path) -> None:
    app = telling_app(tmp_path, task_send_sent_event=True)
    app.send_task("shop.pack", (1,), {"b": 2}, task_id="t", queue="q", shadow="packing")
    [event] = told(app)
    app.close()
    expected = {
        "type": "task-sent",
        "uuid": "t",
        "name": "packing",
        "args": "(1,)",
        "kwargs": "{'b': 2}",
        "root_id": "t",
        "parent_id": None,
        "retries": 0,
        "queue": "q",
        "routing_key": "q",
        "hostname": origin(),
        "clock": 1,
        "seq": 1,
    }
    assert expected.items() <= event.items()


def test_nothing_is_told_unasked(tmp_path: Path) -> None:
    app = telling_app(tmp_path)
    app.send_task("shop.pack")
    assert told(app) == []
    app.close()


def test_the_time_of_sending_is_before_the_message_can_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may have received and started a task before its client goes on."""
    app = telling_app(tmp_path, task_send_sent_event=True)
    publish, began = app.producer.publish, []

    def noted(batch: Any) -> None:
        began.append(time())
        publish(batch)

    monkeypatch.setattr(app.producer, "publish", noted)
    before = time()
    app.send_task("shop.pack")
    [event] = told(app)
    app.close()
    assert before <= event["timestamp"] <= began[0]


def test_events_of_several_threads_have_one_order_without_gaps(tmp_path: Path) -> None:  # L1
    app = telling_app(tmp_path, task_send_sent_event=True)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: app.send_task("shop.pack", (number,)), range(40)))
    events = told(app)
    app.close()
    assert [event["seq"] for event in events] == list(range(1, 41))
    assert [event["clock"] for event in events] == list(range(1, 41))


def test_a_task_is_sent_although_it_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = telling_app(tmp_path, task_send_sent_event=True)

    def full(*args: object, **kwargs: object) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(app.producer, "broadcast", full)
    assert app.send_task("shop.pack", task_id="t").id == "t"
    app.close()
    assert [record.message for record in caplog.records] == [
        "tasks sent, but their task-sent events could not be sent"
    ]
