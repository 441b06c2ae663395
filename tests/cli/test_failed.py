"""`umbel task failed` and `umbel task retry`: what they list, ask, send and refuse."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from tests.cli.running import Ran, Umbel
from umbel import App
from umbel.app.options import SendOptions
from umbel.brokers.interface import Refused
from umbel.brokers.registry import open_broker
from umbel.cli import exits

TASKS = """
from umbel import App

app = App("shop", broker="sqlite:///{broker}")

@app.task(name="shop.pay", sensitive=("card",))
def pay(card):
    pass
"""


def fail(tmp_path: Path, *calls: tuple[str, str, str]) -> str:
    """Failures of tasks by id, name and reason; the address of the broker."""
    url = f"sqlite:///{tmp_path}/shop.db"
    (tmp_path / "tasks.py").write_text(TASKS.format(broker=f"{tmp_path}/shop.db"))
    app = App("client", broker=url)

    async def keep() -> None:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            for task_id, name, reason in calls:  # as one sends it that does not know what is sensitive
                options: SendOptions = {"task_id": task_id, "retries": 2}
                outgoing = app.prepare(name, ("4111-1111",), {}, options).outgoing
                await broker.keep_failed([Refused(outgoing, reason)])
        finally:
            await broker.close()

    asyncio.run(keep())
    app.close()
    return url


def said(ran: Ran, code: int) -> str:
    assert (ran.code, ran.out) == (code, ""), ran
    return ran.err


def test_failed_tasks_are_listed_without_what_nobody_may_read(umbel: Umbel, tmp_path: Path) -> None:
    url = fail(tmp_path, ("t1", "shop.pay", "broken"), ("t2", "shop.mail", "broken too"))
    rows = json.loads(umbel("task", "failed", "--json").out)
    assert [(row["task_id"], row["args"], row["reason"]) for row in rows] == [
        ("t2", "('4111-1111',)", "broken too"),
        ("t1", "***", "broken"),
    ]
    without_app = umbel("task", "failed", "-b", url).out
    assert "t1" in without_app and "t2" in without_app and "4111" not in without_app
    (row,) = json.loads(umbel("task", "failed", "--name", "*.pay", "--json").out)
    assert (row["task_id"], row["attempt"], row["starts"]) == ("t1", 2, 0)
    listed = umbel("task", "failed", "--limit", "1")
    assert "t1" not in listed.out and "1 more" in listed.err


def test_a_retry_is_counted_and_asked_for(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(tmp_path, ("t1", "shop.pay", "broken"), ("t2", "shop.mail", "broken"), ("t3", "shop.mail", "odd"))
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    asked = umbel("task", "retry", "--where", "reason=broken")
    assert asked.code == exits.FAILED and "Retry 2 failed tasks (1 shop.mail, 1 shop.pay)?" in asked.err
    assert len(json.loads(umbel("task", "failed", "--json").out)) == 3
    done = json.loads(umbel("task", "retry", "--where", "reason=broken", "--yes", "--json").out)
    assert done["retried"].keys() == {"t1", "t2"} and not done["refused"] and not done["gone"]
    waiting = json.loads(umbel("queues", "peek", "celery", "--json").out)
    assert {row["task_id"] for row in waiting} == set(done["retried"].values())
    partly = umbel("task", "retry", "t3", "t1", "-y")
    assert partly.code == exits.PARTIAL and "no message of the task t1 is stored" in partly.err
    assert partly.out.splitlines()[0].startswith("t3 retried as ")
    assert "no such failed task" in said(umbel("task", "retry", "--all", "-y"), exits.NOT_FOUND)


def test_a_name_that_a_terminal_would_obey_is_escaped_in_the_question(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(tmp_path, ("t1", "shop\x1b[2J\nAborted", "broken"))
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    asked = umbel("task", "retry", "--all")
    assert r"Retry 1 failed task (1 shop\x1b[2J\nAborted)?" in asked.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give exactly one: ids of tasks"),
        (("t1", "--all"), "give exactly one: ids of tasks"),
        (("t1", "--name", "x"), "give exactly one: ids of tasks"),
        (("--where", "colour=red"), "unknown field 'colour'"),
        (("--where", "reason"), "not a valid filter"),
        (("--since", "soon"), "not a time"),
    ],
)
def test_a_choice_that_is_none_is_refused(umbel: Umbel, arguments: tuple[str, ...], problem: str) -> None:
    assert problem in said(umbel("task", "retry", *arguments), exits.USAGE)
