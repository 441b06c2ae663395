import socket
from pathlib import Path
from typing import Any

import pytest

from umbel import App
from umbel.app.settings import override, size_bytes
from umbel.errors import BadSetting, WorkerLost
from umbel.launch.preparation import node_name
from umbel.launch.project import NativeEndings, task_rules
from umbel.protocol.delivery.delivery import TaskRules
from umbel.wire.call import read_headers
from umbel.wire.message import Message
from umbel.wire.result import decode_result

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, f"umbel@{HOST}"),
        ("w1", f"w1@{HOST}"),
        ("w1@box", "w1@box"),
        ("w1@%h", f"w1@{HOST}"),
    ],
)
def test_a_node_is_named_with_its_host(given: str | None, name: str) -> None:
    assert node_name(given) == name


@pytest.mark.parametrize("given", ["@box", "w1@", "w 1@box", "w1@b\tx"])
def test_a_name_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(BadSetting, match=r"--hostname.*name@host"):
        node_name(given)


def nothing() -> None: ...


def test_the_rules_of_a_task_are_its_own_before_the_apps(tmp_path: Path) -> None:
    app = App("tests", task_time_limit_s=30.0, broker=f"sqlite:///{tmp_path}/never.db")
    app.task(name="plain")(nothing)
    own = app.task(
        name="own", acks_early=True, rate_limit="2/s", time_limit=10, soft_time_limit=8, keep_failed=False
    )
    own(nothing)
    rules = task_rules(app, app.settings)
    assert {name: rules[name] for name in app.tasks} == {
        "plain": TaskRules(acks_early=False, rate_per_second=0.0, hard_limit_s=30.0, keeps_failed=True),
        "own": TaskRules(acks_early=True, rate_per_second=2.0, soft_limit_s=8, hard_limit_s=10),
    }
    assert not task_rules(app, override(app.settings, failed_keep=0))["plain"].keeps_failed


def test_flags_of_the_command_reach_the_rules(app: App) -> None:
    app.task(name="plain")(nothing)
    flagged = override(app.settings, task_time_limit_s=5.0, task_soft_time_limit_s=4.0, task_acks_late=False)
    rules = TaskRules(acks_early=True, soft_limit_s=4.0, hard_limit_s=5.0, keeps_failed=True)
    assert task_rules(app, flagged)["plain"] == rules


# -- what a task leaves that never ran to its end --------------------------------------------------


LOST = WorkerLost("process 4711 was killed by SIGKILL")


def message_of(app: App, **options: Any) -> Message:
    return app.prepare("shop.pack", (1,), {}, {"task_id": "t", **options}).outgoing.message  # type: ignore[typeddict-item]


def test_it_leaves_its_failure(app: App) -> None:
    ending = NativeEndings(app)(message_of(app), "q", LOST, "FAILURE")
    [stored] = ending.results
    found = decode_result(stored.payload)
    assert (stored.task_id, found.status, found.result["exc_type"]) == ("t", "FAILURE", "WorkerLostError")
    assert list(ending.follow_ups) == []


def test_it_leaves_nothing_when_nobody_keeps_its_result(app: App) -> None:
    app.task(name="shop.pack", ignore_result=True)(lambda value: None)
    assert list(NativeEndings(app)(message_of(app), "q", LOST, "FAILURE").results) == []
    # Celery writes null for "as the receiver's task is set".
    undecided = Message(b'{"task":"shop.pack","id":"t","ignore_result":null}', b"[[], {}, {}]")
    assert list(NativeEndings(app)(undecided, "q", LOST, "FAILURE").results) == []


def test_the_steps_behind_it_end_with_it(app: App) -> None:
    steps = (
        app.signature("shop.pack", (1,)) | app.signature("b", task_id="b") | app.signature("c", task_id="c")
    )
    [first] = steps.prepare()
    ending = NativeEndings(app)(first.outgoing.message, "q", LOST, "REVOKED")
    assert {one.task_id for one in ending.results} == {first.task_id, "b", "c"}
    assert {one.status for one in ending.results} == {"REVOKED"}


def test_its_errbacks_are_sent(app: App) -> None:
    message = message_of(app, link_error=app.signature("shop.alarm", ("red",)))
    [sent] = NativeEndings(app)(message, "q", LOST, "FAILURE").follow_ups
    headers = read_headers(sent.message)
    assert (headers.task, headers.argsrepr, headers.parent_id) == ("shop.alarm", "('t', 'red')", "t")


def test_an_errback_that_cannot_be_sent_does_not_harm_the_worker(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.task(name="shop.alarm")(nothing)
    message = message_of(app, link_error=app.signature("shop.alarm"))
    ending = NativeEndings(app)(message, "q", LOST, "FAILURE")
    assert (len(ending.results), list(ending.follow_ups)) == (1, [])
    assert [record.message for record in caplog.records] == ["errback raised an exception"]


def test_a_body_that_cannot_be_read_still_leaves_its_failure(app: App) -> None:
    broken = Message(b'{"task":"shop.pack","id":"t"}', b"[1, ")
    assert [one.task_id for one in NativeEndings(app)(broken, "q", LOST, "FAILURE").results] == ["t"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(200_000, 200_000 * 1024), ("200000", 200_000 * 1024), ("200MB", 200_000_000), ("1.5 GiB", 3 * 2**29)],
)
def test_sizes_of_memory_are_in_kib_unless_they_say_otherwise(size: int | str, expected: int) -> None:
    settings = override(App("a").settings, worker_max_memory_per_child=size)
    assert size_bytes(settings.worker_max_memory_per_child) == expected


@pytest.mark.parametrize("size", ["much", "-3", "12 parsecs", 0, ""])
def test_a_size_that_is_none_is_refused(size: int | str) -> None:
    with pytest.raises(BadSetting, match="must be a size"):
        override(App("a").settings, worker_max_memory_hard=size)
