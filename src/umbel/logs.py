"""Logging of a worker and its children: one line per log entry, with fields, on stderr or in a file.

Texts come from messages and tasks, so they are escaped: they cannot control a terminal or forge a log line
(`text.py`). Only tracebacks span several lines. A traceback from a child arrives as text, and becomes the
field `traceback`.

Umbel limits the rate of its log lines, per kind of line, so that a flood of bad messages does not fill a
disk. What user code logs or prints is not limited.
"""

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Hashable
from datetime import UTC, datetime, tzinfo
from functools import cache
from pathlib import Path
from time import localtime, monotonic, struct_time, time
from typing import Any

import msgspec

from umbel.errors import BadSetting
from umbel.files import make_own
from umbel.protocol.log_limit import Budget, LeftOut, LogLimit
from umbel.text import leaving, lines, one_line
from umbel.wire.show import show_value

OF_ONE_KIND = Budget(100, 0.1)
# Each task has a separate budget, because people read a log to see how tasks end. All tasks together have
# another budget, because senders of messages choose the task names.
OF_ONE_TASK = Budget(100, 10.0)
OF_ALL_TASKS = Budget(1000, 100.0)
TELL_EVERY_S = 10.0
USERS = ("umbel.stdout", "umbel.stderr")  # where the output of tasks is logged
NAME_CHARS_MAX = LINE_CHARS_MAX = 200
LOG_FILE = 0o666  # minus the umask

TRACEBACK = "traceback"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(
    level: str, *, logfile: str | None = None, as_json: bool = False, node: str = "", child: int = 0
) -> None:
    """Set up the logging of this process. `child` is 0 in the main process, otherwise the child's number from
    1.

    Raises BadSetting if the log file cannot be opened.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if logfile:
        path = own_log(logfile, node, child)
        try:
            handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise BadSetting("--logfile", logfile, str(error), source="the command line") from None
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    limit_lines(handler)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def forget_logging() -> None:
    """Remove the logging that a forked process inherited."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler.formatter, PlainLines | JsonLines):
            root.removeHandler(handler)
            handler.close()
            root.setLevel(logging.WARNING)


def limit_lines(handler: logging.Handler) -> None:
    """Limit the rate of Umbel's lines in a handler; at exit, the number of omitted lines is logged."""
    limit = LineLimit(handler)
    handler.addFilter(limit)
    atexit.register(limit.tell)


def log_path(logfile: str, node: str, child: int) -> str:
    """Return the name of a log file with `%n`, `%h`, `%d`, `%p`, `%i` and `%I` replaced, as in Celery.

    `%n%I.log` is `w1.log` for the main process of the node w1, and `w1-1.log` for its first child.
    """
    name, _, host = node.partition("@")
    stands_for = {
        "%n": name,
        "%h": host,
        "%d": host.partition(".")[2],
        "%p": node,
        "%i": str(child),
        "%I": f"-{child}" if child else "",
        "%%": "%",
    }
    return re.sub("%[nhdpiI%]", lambda found: stands_for[found[0]], logfile)


def own_log(logfile: str, node: str, child: int) -> str:
    """Return the path of a process's log file, created if missing; raise BadSetting if another user created
    it.
    """
    path = log_path(logfile, node, child)
    try:
        make_own(Path(path), LOG_FILE)
    except OSError as error:
        raise BadSetting("--logfile", logfile, str(error), source="the command line") from None
    return path


def tell_left_out() -> None:
    """Log the number of omitted lines now, for a process that ends without running its exit functions."""
    for handler in logging.getLogger().handlers:
        for limit in handler.filters:
            if isinstance(limit, LineLimit):
                limit.tell()


class LineLimit(logging.Filter):
    """A logging filter: passes the lines that `LogLimit` admits, and logs every ten seconds how many it
    omitted.

    The handler's lock protects it; logging replaces that lock in a forked process.
    """

    def __init__(self, handler: logging.Handler, *, tell_every_s: float = TELL_EVERY_S) -> None:
        super().__init__("umbel")
        self._handler = handler
        self._tell_every_s = tell_every_s
        self._limit = LogLimit()
        self._examples: dict[Hashable, str] = {}  # by kind, the beginning of the first omitted line
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; count it if it is not."""
        is_ours = super().filter(record) and record.name not in USERS
        if not is_ours or record.levelno >= logging.CRITICAL or hasattr(record, "left_out"):
            return True
        kind = (record.name, record.levelno, str(record.msg))
        kinds: dict[Hashable, Budget] = {kind: OF_ONE_KIND}
        if hasattr(record, "task"):
            kinds = {kind: OF_ALL_TASKS, (*kind, str(record.task)[:NAME_CHARS_MAX]): OF_ONE_TASK}
        self._handler.acquire()
        try:
            over = self._limit.take(kinds, monotonic())
            if over is not None:
                self._note(over, record)
            return over is None
        finally:
            self._handler.release()

    def tell(self) -> None:
        """Log a summary of the omitted lines."""
        self._handler.acquire()
        try:
            examples, self._examples = self._examples, {}
            for left_out in self._limit.left_out(monotonic()):
                self._handler.handle(_summary(left_out, examples.get(left_out.kind, "lines of many kinds")))
        finally:
            self._handler.release()

    def _note(self, kind: Hashable, record: logging.LogRecord) -> None:
        if kind not in self._examples and len(self._examples) < len(self._limit):
            self._examples[kind] = record.getMessage().partition("\n")[0][:LINE_CHARS_MAX]
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(self._tell_every_s, self.tell)
            self._timer.daemon = True
            self._timer.start()


def _summary(left_out: LeftOut, example: str) -> logging.LogRecord:
    fields: dict[str, Any] = {"name": "umbel", "levelno": logging.WARNING}
    match left_out.kind:
        case (name, level, _, *task):
            fields = {"name": name, "levelno": level} | ({"task": task[0]} if task else {})
    text = f"{example} ({left_out.count:,} similar lines omitted in {left_out.seconds:.0f} s)"
    fields |= {"levelname": logging.getLevelName(fields["levelno"]), "left_out": left_out.count}
    return logging.makeLogRecord({"msg": text, **fields})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def with_fields(line: str, record: logging.LogRecord) -> str:
    """Return a line followed by the record's fields and its traceback."""
    fields = _fields(record)
    traceback = fields.pop(TRACEBACK, "")
    line += "".join(f" {name}={_shown(value)}" for name, value in fields.items())
    return f"{line}\n{lines(str(traceback).rstrip())}" if traceback else line


class PlainLines(logging.Formatter):
    """Formats records as text lines with fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._zone = os.environ.get("TZ")

    def converter(self, seconds: float | None) -> struct_time:
        """Return local time in the time zone at the process's start, because user code may change TZ (Django
        does).
        """
        if os.environ.get("TZ") == self._zone:
            return localtime(seconds)
        return datetime.fromtimestamp(seconds or time(), zone_of(self._zone)).timetuple()

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the record's line, escaped, with its fields."""
        return with_fields(one_line(super().formatMessage(record)), record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """Return the traceback, escaped, with its line breaks."""
        return lines(super().formatException(ei))


class JsonLines(logging.Formatter):
    """Formats records as JSON objects, one per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        ours: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {
            **ours,
            **_fields(record),
            **ours,
        }  # in this order; a field of the user cannot replace one of Umbel's
        if record.exc_info:
            line[TRACEBACK] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=repr).decode()
        # invalid Unicode, a number too long, or a value nested too deeply
        except (ValueError, RecursionError):
            plain = {
                leaving(name): leaving(value) if isinstance(value, str) else show_value(value)
                for name, value in line.items()
            }
            return msgspec.json.encode(plain).decode()


@cache
def zone_of(variable: str | None) -> tzinfo:
    """Return the time zone for a value of TZ, or of the machine for None; UTC if it cannot be determined."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # takes a hundredth of a worker's start time

    try:
        if variable:
            return ZoneInfo(variable.lstrip(":"))
        with Path("/etc/localtime").open("rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError, ZoneInfoNotFoundError):
        return UTC


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text or not text.isprintable() else text
