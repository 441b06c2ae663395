"""Lines of the log: whatever text is in them, one line a fact, and nothing that a terminal obeys (N1)."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from umbel.logs import JsonLines, PlainLines, set_up_logging

HOSTILE = f"a\x1b[2J\nFAKE LINE\u202e{os.fsdecode(bytes([255]))}"


def record(
    message: str, *args: object, error: BaseException | None = None, **fields: Any
) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    made = logging.LogRecord("umbel.test", logging.INFO, "f.py", 1, message, args, info)
    vars(made).update(fields)
    return made


def test_text_in_messages_and_fields_stays_in_its_line() -> None:
    line = PlainLines().format(record("heard %s", HOSTILE, why=HOSTILE, task="plain"))
    assert line.isprintable()
    assert line.endswith(" task=plain")


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    for made in (
        record("failed", traceback=f"Traceback:\n  {HOSTILE}"),
        record("x", error=ValueError(HOSTILE)),
    ):
        written = PlainLines().format(made)
        assert written.count("\n") >= 2
        assert all(line.isprintable() for line in written.split("\n"))


class Unprintable:
    def __repr__(self) -> str:
        return HOSTILE


@pytest.mark.parametrize(
    "value", [HOSTILE, [HOSTILE], {HOSTILE: 1}, Unprintable(), pytest.param(10**5000, id="a long number")]
)
def test_json_lines_carry_any_text(value: object) -> None:
    read = json.loads(JsonLines().format(record("heard %s", HOSTILE, why=value)))
    assert read["message"].startswith("heard a\x1b[2J\nFAKE LINE\u202e")
    assert "why" in read


def test_a_file_takes_any_text(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_logging("info", logfile=str(tmp_path / "log"))
        logging.getLogger("umbel.test").info("heard %s", HOSTILE)
        root.handlers[0].close()
    finally:
        root.handlers[:], root.level = handlers, level
    assert "FAKE LINE" in (tmp_path / "log").read_text()
