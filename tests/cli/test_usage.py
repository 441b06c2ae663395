"""How commands are used wrongly, and what they say: one line with a hint, and an exit code."""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from time import time
from typing import Any

import pytest

from tests.cli.running import Ran, Umbel
from umbel import App
from umbel.brokers.interface import Bury, Started
from umbel.brokers.registry import open_broker
from umbel.cli import exits
from umbel.cli.main import COMMANDS
from umbel.wire.result import encode_failure, encode_state, encode_success, exception_map
from umbel.worker.run_directory import write_state

APP = """
from umbel import App

app = App("{name}", broker="sqlite:///{broker}")

@app.task(name="shop.pack")
def pack(box, count=1):
    return box * count
"""


def write_app(tmp_path: Path, file: str = "tasks.py", name: str = "shop") -> App:
    """A file with an app, and the same app for the test to look through."""
    broker = f"{tmp_path}/{name}.db"
    (tmp_path / file).write_text(APP.format(name=name, broker=broker))
    return App(name, broker=f"sqlite:///{broker}")


def said(ran: Ran, code: int) -> str:
    """The one line of a command that refused."""
    assert (ran.code, ran.out) == (code, ""), ran
    [line] = ran.err.splitlines()
    assert line.startswith("umbel: ")
    return line.removeprefix("umbel: ")


def test_the_exit_codes_are_those_that_are_documented() -> None:
    codes = {name: value for name, value in vars(exits).items() if name.isupper()}
    assert codes == {"OK": 0, "FAILED": 1, "USAGE": 2, "NOT_FOUND": 3, "NOBODY_ANSWERED": 69, "PARTIAL": 75}


# -- names of commands and options -----------------------------------------------------------------


def test_an_unknown_command_is_refused_with_the_nearest(umbel: Umbel) -> None:
    line = said(umbel("wroker"), exits.USAGE)
    assert "No such command 'wroker'" in line
    assert "'worker'" in line
    assert "umbel --help" in line


@pytest.mark.parametrize("group", ["queues", "dlq"])
def test_an_unknown_command_of_a_group_is_refused(umbel: Umbel, group: str) -> None:
    assert "No such command 'lz'" in said(umbel(group, "lz"), exits.USAGE)


@pytest.mark.parametrize(
    "command",
    [
        ["worker"],
        ["call"],
        ["result"],
        ["queues", "ls"],
        ["queues", "peek"],
        ["queues", "purge"],
        ["dlq", "ls"],
        ["dlq", "requeue"],
        ["health"],
        ["doctor"],
        ["demo"],
    ],
)
def test_an_unknown_option_of_any_command_is_refused(umbel: Umbel, command: list[str]) -> None:
    line = said(umbel(*command, "--no-such-option"), exits.USAGE)
    assert "No such option '--no-such-option'" in line
    assert f"umbel {' '.join(command)} --help" in line


def test_an_option_is_refused_with_the_nearest(umbel: Umbel) -> None:
    assert "Did you mean '--countdown'" in said(umbel("call", "--countdwn", "3", "x"), exits.USAGE)


def test_every_command_can_be_asked_for_help(umbel: Umbel) -> None:
    for name in COMMANDS:
        ran = umbel(name, "--help")
        assert (ran.code, ran.err) == (exits.OK, ""), name
        assert ran.out.startswith(f"Usage: umbel {name}")


def test_without_a_command_the_commands_are_listed(umbel: Umbel) -> None:
    ran = umbel()
    assert ran.code == exits.USAGE
    assert all(name in ran.err for name in COMMANDS)


def test_the_version_is_told(umbel: Umbel) -> None:
    assert umbel("--version").out.startswith("umbel, version ")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["call"], "TASK"),
        (["result"], "TASK_ID"),
        (["queues", "peek"], "QUEUE"),
        (["queues", "purge"], "QUEUE"),
    ],
)
def test_a_missing_argument_is_named(umbel: Umbel, command: list[str], missing: str) -> None:
    assert f"Missing argument '{missing}'" in said(umbel(*command), exits.USAGE)


# -- the app ---------------------------------------------------------------------------------------


NEEDS_APP = [
    ["call", "shop.pack"],
    ["result", "some-id"],
    ["queues", "ls"],
    ["queues", "peek", "celery"],
    ["queues", "purge", "celery", "-y"],
    ["dlq", "ls"],
    ["dlq", "requeue", "--all"],
    ["worker"],
]


@pytest.mark.parametrize("command", NEEDS_APP)
def test_without_an_app_a_command_says_where_it_looked(umbel: Umbel, command: list[str]) -> None:
    line = said(umbel(*command), exits.USAGE)
    assert "neither ./tasks.py nor ./app.py exists; use -A module:attr" in line


@pytest.mark.parametrize("command", NEEDS_APP)
def test_an_app_that_is_not_there_is_refused_by_name(umbel: Umbel, command: list[str]) -> None:
    assert "there is no module 'nowhere' here" in said(umbel(*command, "-A", "nowhere"), exits.USAGE)


def test_the_app_is_named_before_or_after_the_command_and_the_latter_wins(
    umbel: Umbel, tmp_path: Path
) -> None:
    write_app(tmp_path, "usage_one.py", "one")
    two = write_app(tmp_path, "usage_two.py", "two")
    assert umbel("-A", "usage_one", "queues", "ls").code == exits.OK
    assert umbel("queues", "ls", "-A", "usage_one:app").code == exits.OK
    sent = umbel("-A", "usage_one", "call", "shop.pack", "a", "-A", "usage_two", "-q", "here")
    assert sent.code == exits.OK
    rows = json.loads(umbel("queues", "ls", "--json", "-A", "usage_two").out)
    assert [row["queue"] for row in rows] == ["here"]
    assert json.loads(umbel("queues", "ls", "--json", "-A", "usage_one").out) == []
    two.close()


def test_left_out_the_app_is_found_in_tasks_then_in_app(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path, "app.py", "second")
    assert "second: 1 tasks" in umbel("doctor").out
    write_app(tmp_path, "tasks.py", "first")
    assert "first: 1 tasks" in umbel("doctor").out


def test_several_apps_are_named(umbel: Umbel, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("from umbel import App\na = App('a')\nb = App('b')\n")
    assert "several apps; name one of a, b after a colon" in said(umbel("queues", "ls"), exits.USAGE)
    assert umbel("-A", "tasks:b", "queues", "ls").code == exits.OK


def test_an_app_that_cannot_be_imported_says_why_in_one_line(umbel: Umbel, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("from umbel import App\napp = App('a', lease_s='ten')\n")
    line = said(umbel("queues", "ls"), exits.USAGE)
    assert "setting 'lease_s' in App(...) is 'ten'" in line


def test_an_unknown_variable_is_refused_in_one_line(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_app(tmp_path)
    monkeypatch.setenv("UMBEL_LEASES", "3")
    line = said(umbel("queues", "ls"), exits.USAGE)
    assert "UMBEL_LEASES" in line and "'lease_s'" in line


def test_an_address_that_no_broker_has_is_refused(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_app(tmp_path)
    monkeypatch.setenv("UMBEL_BROKER", "carrier-pigeon://loft")
    assert "'carrier-pigeon://loft'" in said(umbel("queues", "ls"), exits.USAGE)


def test_a_broker_that_cannot_be_opened_is_nobody_answering(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_app(tmp_path)
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("UMBEL_BROKER", f"sqlite:///{tmp_path}/a-file/umbel.db")
    for command in (["queues", "ls"], ["call", "shop.pack", "a"]):
        assert "a-file" in said(umbel(*command), exits.NOBODY_ANSWERED)


# -- call ------------------------------------------------------------------------------------------


def test_a_call_prints_its_id_or_json(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    assert umbel("call", "shop.pack", "a", "--task-id", "t").out == "t\n"
    assert json.loads(umbel("call", "shop.pack", "a", "--task-id", "u", "--json").out) == {"task_id": "u"}


def test_arguments_are_json_or_text(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    umbel("call", "shop.pack", '{"a": [1]}', "3")
    umbel("call", "shop.pack", "--args", '["b"]', "--kwargs", '{"count": 2}', "--countdown", "0")
    umbel("call", "shop.pack", "plain text")
    rows = json.loads(umbel("queues", "peek", "celery", "--json").out)
    assert sorted((row["args"], row["kwargs"]) for row in rows) == [
        ("('b',)", "{'count': 2}"),
        ("('plain text',)", "{}"),
        ("({'a': [1]}, 3)", "{}"),
    ]


def waiting_in(umbel: Umbel, queue: str, *where: str) -> list[tuple[str, str, str]]:
    rows = json.loads(umbel("queues", "peek", queue, "--json", *where).out)
    return [(row["task"], row["args"], row["kwargs"]) for row in rows]


def test_a_name_and_a_value_are_a_keyword_argument(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    umbel("call", "shop.pack", "box=[1]", "count=two")
    umbel("call", "shop.pack", '"count=3"')
    umbel("call", "shop.pack", "a-b=c", "--kwargs", '{"count": 4}')
    assert waiting_in(umbel, "celery") == [
        ("shop.pack", "()", "{'box': [1], 'count': 'two'}"),
        ("shop.pack", "('count=3',)", "{}"),
        ("shop.pack", "('a-b=c',)", "{'count': 4}"),
    ]
    twice = umbel("call", "shop.pack", "count=1", "--kwargs", '{"count": 4}')
    assert "the argument 'count' is given twice" in said(twice, exits.USAGE)


def test_a_call_goes_to_the_broker_that_is_named_with_or_without_an_app(umbel: Umbel, tmp_path: Path) -> None:
    other = ("-b", f"sqlite:///{tmp_path}/other.db")
    assert umbel("call", "made.up", "1", *other).code == exits.OK
    write_app(tmp_path)
    assert "no task named 'made.up'" in said(umbel("call", "made.up", *other), exits.USAGE)
    assert umbel("call", "shop.pack", "a", *other).code == exits.OK
    assert waiting_in(umbel, "celery") == []
    tasks = [task for task, *_ in waiting_in(umbel, "celery", *other)]
    assert tasks == ["made.up", "shop.pack"]


def test_an_unknown_task_is_refused_with_the_nearest(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    line = said(umbel("call", "shop.pak", "a"), exits.USAGE)
    assert "no task named 'shop.pak'" in line
    assert "did you mean 'shop.pack'?" in line
    assert "--unregistered" in line
    assert "known: shop.pack" in said(umbel("call", "zzz"), exits.USAGE)
    assert umbel("call", "zzz", "--unregistered").code == exits.OK


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--args", "[1, "], "'[1, ' is not JSON"),
        (["--args", '{"a": 1}'], "is not a JSON list"),
        (["--kwargs", "{'a': 1}"], "is not JSON"),
        (["--kwargs", "[1]"], "is not a JSON object"),
        (["--eta", "tomorrow"], "'tomorrow' is not an ISO 8601 time"),
        (["--countdown", "soon"], "'soon' is not a valid float"),
        (["--priority", "11"], "11 is not in the range 0<=x<=9"),
        ([], "missing a required argument: 'box'"),
        (["a", "1", "2", "3"], "too many positional arguments"),
        (["--kwargs", '{"bix": 1}'], "cannot send shop.pack(box, count=1)"),
    ],
)
def test_a_call_that_cannot_be_is_refused(
    umbel: Umbel, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    write_app(tmp_path)
    assert problem in said(umbel("call", "shop.pack", *arguments), exits.USAGE)


def test_a_call_too_large_fails_with_figures(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_app(tmp_path)
    monkeypatch.setenv("UMBEL_MESSAGE_MAX_BYTES", "2000")
    assert "over the limit of 2000" in said(umbel("call", "shop.pack", "x" * 3000), exits.FAILED)


def test_a_call_nobody_takes_has_no_final_state(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    assert "no result of t yet" in said(
        umbel("call", "shop.pack", "a", "--task-id", "t", "--wait", "0.01"), exits.NOT_FOUND
    )


# -- result ----------------------------------------------------------------------------------------


def store(app: App, *results: Any) -> None:
    app.backend.store(results)
    app.close()


def test_a_result_that_is_not_there_is_not_found(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    assert "no result of nothing yet: the task is unknown, waiting or running" in said(
        umbel("result", "nothing"), exits.NOT_FOUND
    )
    ran = umbel("result", "nothing", "--json")
    assert (ran.code, json.loads(ran.out)["state"]) == (exits.NOT_FOUND, "PENDING")


def test_a_success_is_printed_and_can_be_forgotten(umbel: Umbel, tmp_path: Path) -> None:
    store(write_app(tmp_path), encode_success("t", ["a", 1], done_at=time()))
    assert umbel("result", "t") == Ran(exits.OK, "['a', 1]\n", "")
    assert json.loads(umbel("result", "t", "--json", "--forget").out) == {
        "task_id": "t",
        "state": "SUCCESS",
        "result": ["a", 1],
        "traceback": None,
    }
    assert umbel("result", "t").code == exits.NOT_FOUND


def test_a_failure_is_told_with_its_traceback_on_stderr(umbel: Umbel, tmp_path: Path) -> None:
    error = exception_map(ValueError("bad", 3))
    store(write_app(tmp_path), encode_failure("t", error, "Traceback …", done_at=time()))
    assert umbel("result", "t") == Ran(exits.FAILED, "FAILURE: ValueError('bad', 3)\n", "Traceback …\n")
    assert json.loads(umbel("result", "t", "--json").out)["traceback"] == "Traceback …"


def test_a_state_on_the_way_is_shown_but_not_final(umbel: Umbel, tmp_path: Path) -> None:
    store(write_app(tmp_path), encode_state("t", "PROGRESS", {"done": 3}))
    assert umbel("result", "t") == Ran(exits.NOT_FOUND, "PROGRESS: {'done': 3}\n", "")


# -- queues and dead letters -----------------------------------------------------------------------


def test_a_limit_out_of_range_is_refused(umbel: Umbel) -> None:
    assert "'--limit': 0 is not in the range" in said(
        umbel("queues", "peek", "q", "--limit", "0"), exits.USAGE
    )
    assert "'--limit'" in said(umbel("dlq", "ls", "--limit", "many"), exits.USAGE)


def test_requeueing_wants_names_or_all(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    for arguments in ([], ["7", "--all"]):
        assert "name the dead letters to requeue, or give --all" in said(
            umbel("dlq", "requeue", *arguments), exits.USAGE
        )


def test_a_dead_letter_that_is_not_there_is_not_found(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    ran = umbel("dlq", "requeue", "no-such-letter")
    assert (ran.code, ran.out) == (exits.NOT_FOUND, "0 requeued\n")
    assert "unknown dead letter 'no-such-letter'; `umbel dlq ls` lists them" in ran.err


def bury(app: App, reason: str, *, send: bool = True, starts: int = 0) -> None:
    """Send a task and let a worker of one moment give it up."""

    async def scenario() -> None:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            if send:
                await broker.publish([app.prepare("shop.pack", ("a",), {}, {"task_id": "t"}).outgoing])
            [delivery] = (await broker.claim("w", ["celery"], 1)).deliveries
            await broker.settle([*[Started(delivery.tag)] * starts, Bury(delivery.tag, reason)])
        finally:
            await broker.close()

    asyncio.run(scenario())


def test_dead_letters_are_listed_with_their_reason_and_given_back(umbel: Umbel, tmp_path: Path) -> None:
    bury(write_app(tmp_path), "started 3 times, and its process died each time")
    [row] = json.loads(umbel("dlq", "ls", "--json").out)
    assert (row["task"], row["task_id"], row["queue"]) == ("shop.pack", "t", "celery")
    assert "started 3 times, and its process died each time" in umbel("dlq", "ls").out
    assert "`umbel dlq ls` lists them with reasons" in umbel("doctor").out
    assert umbel("dlq", "requeue", "t", "no-such", "--json").code == exits.PARTIAL
    assert umbel("dlq", "ls", "--json").out == "[]\n"
    [waiting] = json.loads(umbel("queues", "peek", "celery", "--json").out)
    assert (waiting["task_id"], waiting["starts"]) == ("t", 0)


def test_a_dead_letter_is_shown_whole_and_dropped_only_when_asked_twice(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(write_app(tmp_path), "it crashed\nin line 2")
    shown = umbel("dlq", "show", "t", "no-such")
    assert shown.code == exits.PARTIAL and "unknown dead letter 'no-such'" in shown.err
    assert {"task     shop.pack", "args     ('a',)", "reason   it crashed", "attempt  0"} <= {
        *shown.out.splitlines()
    }
    [row] = json.loads(umbel("dlq", "show", "t", "--json").out)
    assert (row["task_id"], row["reason"], row["args"]) == ("t", "it crashed\nin line 2", "('a',)")
    assert "name the dead letters to drop, or give --all" in said(umbel("dlq", "drop"), exits.USAGE)
    asked_on_a_loop: list[bool] = []

    class Answer(io.StringIO):
        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            asked_on_a_loop.append(asyncio._get_running_loop() is not None)
            return super().readline(size)

    monkeypatch.setattr("sys.stdin", Answer("n\n"))
    assert umbel("dlq", "drop", "t").code == exits.FAILED
    assert asked_on_a_loop == [False], "a connection would be kept from its heartbeats"
    assert len(json.loads(umbel("dlq", "ls", "--json").out)) == 1
    assert umbel("dlq", "drop", "t", "-y").out == "1 dropped\n"
    assert umbel("dlq", "drop", "--all", "-y").out == "0 dropped\n"
    assert umbel("dlq", "ls", "--json").out == "[]\n"
    assert waiting_in(umbel, "celery") == []


def test_a_letter_that_was_requeued_before_shows_its_earlier_starts(umbel: Umbel, tmp_path: Path) -> None:
    app = write_app(tmp_path)
    bury(app, "it crashed", starts=2)
    assert "earlier_starts" not in umbel("dlq", "show", "t").out
    assert umbel("dlq", "requeue", "t").code == exits.OK
    bury(app, "it crashed again", send=False, starts=1)
    assert {"starts   1", "earlier_starts 2"} <= {*umbel("dlq", "show", "t").out.splitlines()}
    [row] = json.loads(umbel("dlq", "ls", "--json").out)
    assert (row["starts"], row["earlier_starts"]) == (1, 2)


def test_all_dead_letters_of_a_task_are_meant_by_its_id(umbel: Umbel, tmp_path: Path) -> None:
    app = write_app(tmp_path)
    for reason in ("it crashed", "it crashed again"):
        bury(app, reason)
    shown = json.loads(umbel("dlq", "show", "t", "--json").out)
    assert {row["reason"] for row in shown} == {"it crashed", "it crashed again"}
    assert umbel("dlq", "drop", "t", str(shown[0]["id"]), "-y").out == "2 dropped\n"


def test_a_queue_is_shown_and_emptied_only_when_asked_twice(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_app(tmp_path)
    umbel("call", "shop.pack", "a", "--task-id", "t")
    assert "shop.pack" in umbel("queues", "peek", "celery").out
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    ran = umbel("queues", "purge", "celery")
    assert (ran.code, ran.out) == (exits.FAILED, "")
    assert "Remove 1 messages from 'celery'?" in ran.err
    assert umbel("queues", "purge", "celery", "-y").out == "1 messages removed from celery\n"
    assert json.loads(umbel("queues", "purge", "celery", "--json").out) == {"queue": "celery", "removed": 0}


def test_what_is_not_there_is_not_found_and_nobody_is_nobody(umbel: Umbel, tmp_path: Path) -> None:
    write_app(tmp_path)
    assert "unknown election 'never'" in said(umbel("election", "show", "never"), exits.NOT_FOUND)
    assert "unknown periodic task 'nightly'" in said(umbel("schedule", "run", "nightly"), exits.NOT_FOUND)
    assert umbel("schedule", "pause", "nightly").code == exits.NOT_FOUND
    assert "no node answered" in said(umbel("members", "--timeout", "2"), exits.NOBODY_ANSWERED)
    nobody = said(umbel("ping", "--timeout", "2"), exits.NOBODY_ANSWERED)
    assert nobody.startswith("no worker answered; start one with `umbel worker`")


# -- doctor ----------------------------------------------------------------------------------------


def found_by_doctor(umbel: Umbel, check: str) -> tuple[int, list[tuple[str, str]]]:
    ran = umbel("doctor", "--json")
    findings = [(one["verdict"], one["detail"]) for one in json.loads(ran.out) if one["check"] == check]
    return ran.code, findings


def test_doctor_fails_on_an_app_that_cannot_be_imported(umbel: Umbel, tmp_path: Path) -> None:
    code, [(verdict, _)] = found_by_doctor(umbel, "app")  # there is none
    assert (code, verdict) == (exits.OK, "note")
    (tmp_path / "tasks.py").write_text("import no_such_module_at_all\n")
    code, [(verdict, detail)] = found_by_doctor(umbel, "app")
    assert (code, verdict) == (exits.FAILED, "FAIL")
    assert "no_such_module_at_all" in detail


def test_doctor_fails_on_variables_that_nobody_reads(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_by_doctor(umbel, "environment") == (exits.OK, [])
    monkeypatch.setenv("UMBEL_BROKRE", "redis://localhost")
    monkeypatch.setenv("UMBEL_LEASE_S", "soon")
    code, findings = found_by_doctor(umbel, "environment")
    assert code == exits.FAILED
    assert [verdict for verdict, _ in findings] == ["FAIL", "FAIL"]
    assert "brokre" in findings[0][1] and "'broker'" in findings[0][1] and "lease_s" in findings[1][1]


# -- worker and health -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["-c", "0"], "'worker_concurrency' in the command line is 0: must be at least 1"),
        (["-c", "two"], "'two' is not a whole number"),
        (["-P", "gevnt"], "'worker_pool' in the command line is 'gevnt'"),
        (["-n", "@host"], "write it as name@host"),
        (["-Q", " , "], "contains no queue name"),
        (["-l", "loud"], "'loud' is not one of"),
        (["--grace", "-1"], "'worker_grace_s' in the command line is -1.0"),
        (["--time-limit", "0"], "'task_time_limit_s' in the command line is 0.0"),
    ],
)
def test_a_worker_refuses_flags_that_cannot_be(
    umbel: Umbel, tmp_path: Path, flags: list[str], problem: str
) -> None:
    write_app(tmp_path)
    assert problem in said(umbel("worker", *flags), exits.USAGE)


def test_where_no_worker_left_word_health_finds_none(umbel: Umbel, tmp_path: Path) -> None:
    line = said(umbel("health", "--run-dir", str(tmp_path / "run")), exits.NOT_FOUND)
    assert f"no worker has a state file in {tmp_path / 'run'}" in line
    ran = umbel("health", "-n", "w9", "--run-dir", str(tmp_path / "run"), "--json")
    assert (ran.code, json.loads(ran.out)) == (exits.NOT_FOUND, [])


def test_health_tells_of_each_worker_and_fails_if_one_is_not_well(umbel: Umbel, tmp_path: Path) -> None:
    def write(node: str, **fields: Any) -> None:
        write_state(tmp_path, node, "sqlite:////q.db", {"node": node, "pid": os.getpid()} | fields)

    write("a@host", counters={"processed": 7})
    ran = umbel("health", "--run-dir", str(tmp_path))
    assert ran == Ran(exits.OK, "a@host: healthy, 0 running, 7 processed\n", "")
    write("b@host", problem="cannot fetch messages")
    ran = umbel("health", "--run-dir", str(tmp_path))
    assert (ran.code, ran.out.splitlines()[1]) == (
        exits.FAILED,
        "b@host: unhealthy: cannot fetch messages",
    )
    assert umbel("health", "-n", "a", "--run-dir", str(tmp_path)).code == exits.OK
    assert umbel("health", "-n", "b@host", "--run-dir", str(tmp_path)).code == exits.FAILED
    rows = json.loads(umbel("health", "--json", "--run-dir", str(tmp_path)).out)
    assert [(row["node"], row["healthy"]) for row in rows] == [("a@host", True), ("b@host", False)]


# -- the installed command -------------------------------------------------------------------------


def test_the_installed_command_is_this_one(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("umbel")), "call", "x"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert "use -A module:attr" in said(Ran(ran.returncode, ran.stdout, ran.stderr), exits.USAGE)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    write_app(tmp_path)
    command = [sys.executable, "-m", "umbel.cli.main", "queues", "ls", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert (child.stderr.read(), child.wait(timeout=60)) == ("", exits.OK)


# -- asking workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "actve"], "unknown command 'actve'; did you mean 'active'?"),
        (["inspect", "shutdown"], "'shutdown' belongs to `umbel control`: use `umbel control shutdown`"),
        (["control", "stats"], "'stats' belongs to `umbel inspect`: use `umbel inspect stats`"),
        (["control", "rate_limit", "t"], "rate_limit needs rate_limit; usage: rate_limit TASK RATE"),
        (["control", "pool_grow", "many"], "n must be a whole number, not 'many'"),
        (["inspect", "ping", "x"], "ping takes no argument 'x'"),
        (["inspect", "query_task"], "query_task needs ids"),
        (["ping", "-d", "a@x", "--glob", "*"], "give only one of --destination, --glob and --regex"),
        (["ping", "--timeout", "0"], "--timeout must be above 0"),
        (["ping", "--regex", "(?=a)"], "invalid perl operator: (?="),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(
    umbel: Umbel, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "tasks.py").write_text(APP.format(name="shop", broker=tmp_path / "queue.db"))
    ran = umbel(*arguments)
    assert ran.code == exits.USAGE and said in ran.err and ran.out == ""


def test_commands_are_listed_with_their_arguments(umbel: Umbel, tmp_path: Path) -> None:
    app = APP.format(name="shop", broker=tmp_path / "queue.db")
    own = '@app.panel.control_command(signature="BOX")\ndef seal(state, box):\n    """Close a box."""\n'
    (tmp_path / "tasks.py").write_text(f"{app}\n\n{own}")
    told = umbel("control")
    assert told.code == exits.OK
    assert "rate_limit TASK RATE" in told.out and "Close a box." in told.out
    assert "election" not in told.out and "stats" not in told.out
    asked = umbel("inspect")
    assert "query_task ID [ID ...]" in asked.out and "hello" not in asked.out
