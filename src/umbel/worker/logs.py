"""How a worker and its children log: one line a fact, its fields behind it, to stderr or a file."""

import logging
import os
import sys
from typing import Any

import msgspec

from umbel.errors import BadSetting

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(level: str, *, logfile: str | None = None, as_json: bool = False) -> None:
    """`%p` in the name of the file is the process id: one file for each child."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if logfile:
        path = logfile.replace("%p", str(os.getpid()))
        try:
            handler = logging.FileHandler(path)
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
        line = super().formatMessage(record)
        fields = _fields(record)
        return line + "".join(f" {name}={_shown(value)}" for name, value in fields.items())


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
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text
