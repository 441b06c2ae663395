"""The worker's log under floods: bounded, and what was left out is counted (N1)."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from umbel.logs import OF_ALL_TASKS, OF_ONE_KIND, OF_ONE_TASK, JsonLines, LineLimit

FLOOD = 120_000
SLACK = 100  # lines that budgets gain while a slow machine writes


class Log:
    """A handler with the limit, on a logger that nothing else listens to."""

    def __init__(self, *, tell_every_s: float = 3600.0) -> None:
        self._stream = io.StringIO()
        self._handler = logging.StreamHandler(self._stream)
        self._handler.setFormatter(JsonLines())
        self.limit = LineLimit(self._handler, tell_every_s=tell_every_s)
        self._handler.addFilter(self.limit)

    def write(self, name: str, level: int, template: str, *args: object, **fields: object) -> None:
        record = logging.makeLogRecord(
            {"name": name, "levelno": level, "levelname": "X", "msg": template, "args": args, **fields}
        )
        self._handler.handle(record)

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]

    def size_bytes(self) -> int:
        return len(self._stream.getvalue())


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    if made.limit._timer is not None:
        made.limit._timer.cancel()


def left_out(log: Log) -> int:
    log.limit.tell()
    return sum(int(str(line.get("left_out", 0))) for line in log.lines())


def written(log: Log) -> int:
    return sum("left_out" not in line for line in log.lines())


def test_a_flood_of_bad_messages_writes_a_bounded_log_and_counts_what_is_left_out(log: Log) -> None:
    for number in range(FLOOD):
        log.write(
            "umbel.worker",
            logging.ERROR,
            "%s; moved to dead letters",
            "corrupt message",
            why=f"byte {number}",
        )
    assert left_out(log) + written(log) == FLOOD
    assert written(log) <= OF_ONE_KIND.at_once + SLACK and log.size_bytes() < 50_000
    assert str(log.lines()[-1]["message"]).startswith("corrupt message; moved to dead letters (119,")


def test_lines_about_tasks_have_a_budget_for_each_task_and_one_for_all_names(log: Log) -> None:
    for number in range(FLOOD // 2):
        log.write("umbel.worker", logging.ERROR, "%s", "task failed\nTraceback", task="a.b")
        log.write("umbel.worker", logging.ERROR, "task moved to dead letters", task=f"made up {number}")
    log.write("umbel.worker", logging.ERROR, "%s", "task failed\nTraceback", task="another")
    assert log.lines()[-1]["task"] == "another"
    failures = [line for line in log.lines() if line["task"] == "a.b"]
    assert OF_ONE_TASK.at_once <= len(failures) < FLOOD // 4
    assert written(log) - len(failures) < FLOOD // 4
    assert left_out(log) + written(log) == FLOOD + 1
    (summary,) = [line for line in log.lines() if line.get("task") == "a.b" and "left_out" in line]
    assert str(summary["message"]).startswith("task failed (")
    assert OF_ALL_TASKS.at_once > OF_ONE_TASK.at_once


def test_what_users_log_or_print_and_what_is_critical_is_never_left_out(log: Log) -> None:
    for _ in range(1000):
        log.write("umbel.stdout", logging.WARNING, "%s", "printed")
        log.write("shop.orders", logging.WARNING, "an order")
        log.write("umbellifer", logging.WARNING, "another library")
        log.write("umbel.worker", logging.CRITICAL, "the end")
    assert written(log) == 4000 and left_out(log) == 0


def test_a_line_of_json_has_a_time_that_people_read_and_names_that_nobody_takes(log: Log) -> None:
    log.write("shop", logging.INFO, "%s sent", "it", created=1.5, time="mine", order=7, traceback="Tr")
    assert log.lines() == [
        {
            "time": "1970-01-01T00:00:01.500000+00:00",
            "level": "x",
            "logger": "shop",
            "message": "it sent",
            "order": 7,
            "traceback": "Tr",
        }
    ]


def test_the_count_is_written_although_nothing_more_is_logged() -> None:
    log = Log(tell_every_s=0.01)
    for _ in range(OF_ONE_KIND.at_once + 5):
        log.write("umbel.worker", logging.WARNING, "control command refused")
    wait_until(lambda: left_out_so_far(log) == 5, what="the count")


def left_out_so_far(log: Log) -> int:
    return sum(int(str(line.get("left_out", 0))) for line in log.lines())
