"""How a worker and its children log: one line a fact, its fields behind it, to stderr or a file.

Texts come from messages and tasks, so nothing in them is obeyed by a terminal or begins a line that
was not logged (`text.py`). Only tracebacks have several lines; one that is known as text, because
it comes from a child, is given as the field `traceback`.
"""

import logging
import os
import sys
from typing import Any

import msgspec

from umbel.errors import BadSetting
from umbel.text import leaving, lines, one_line
from umbel.wire.show import show_value

TRACEBACK = "traceback"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(level: str, *, logfile: str | None = None, as_json: bool = False) -> None:
    """`%p` in the name of the file is the process id: one file for each child."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if logfile:
        path = logfile.replace("%p", str(os.getpid()))
        try:
            handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise BadSetting("--logfile", logfile, str(error), source="the command line") from None
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class PlainLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        line = one_line(super().formatMessage(record))
        fields = _fields(record)
        traceback = fields.pop(TRACEBACK, "")
        line += "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        return f"{line}\n{lines(str(traceback).rstrip())}" if traceback else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        return lines(super().formatException(ei))


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line[TRACEBACK] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=repr).decode()
        except (ValueError, RecursionError):  # text that is no Unicode, a number too long, something too deep
            plain = {
                leaving(name): leaving(value) if isinstance(value, str) else show_value(value)
                for name, value in line.items()
            }
            return msgspec.json.encode(plain).decode()


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text or not text.isprintable() else text
