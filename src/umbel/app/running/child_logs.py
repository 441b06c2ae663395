"""Logging in a child: what a task logs or prints looks like the worker's own log lines and names the task.

If the app has configured logging itself, that is not changed. Printed text is logged line by line. What a C
library or a subprocess writes to the file descriptors is not captured.
"""

import io
import logging
import os
import sys
import threading
from typing import TextIO

from umbel.app.request import current_request
from umbel.logs import set_up_logging
from umbel.pools.interface import ChildContext

LINE_MAX_CHARS = 16 * 1024  # the rest of a longer line is left out and counted


def set_up_child_logging(context: ChildContext) -> None:
    """Log to the worker's destination, with the running task's name and id in each record."""
    root = logging.getLogger()
    if root.handlers:
        return
    set_up_logging(
        context.loglevel,
        logfile=context.logfile,
        as_json=context.log_json,
        node=context.node,
        child=context.child + 1,
    )

    def name_the_task(record: logging.LogRecord) -> bool:
        request = current_request()
        if request is not None:
            record.task, record.task_id, record.attempt = request.task, request.id, request.retries
        record.child, record.pid = context.child, os.getpid()
        return True

    for handler in root.handlers:
        handler.addFilter(name_the_task)


def redirect_streams(level: str) -> None:
    """Log what tasks print, at this level."""
    number = logging.getLevelNamesMapping()[level]
    sys.stdout = LoggedStream("umbel.stdout", number, sys.stdout)
    sys.stderr = LoggedStream("umbel.stderr", number, sys.stderr)


class _Line(threading.local):
    """The line that a thread has begun, as far as it will be logged."""

    def __init__(self) -> None:
        self.is_logged = False
        self._parts: list[str] = []
        self._room, self._left_out = LINE_MAX_CHARS, 0

    def add(self, text: str, start: int, end: int) -> None:
        fitting = min(end - start, self._room)
        if fitting:
            self._parts.append(text[start : start + fitting])
            self._room -= fitting
        self._left_out += end - start - fitting

    def end(self) -> str:
        """Return the line and begin another."""
        line = "".join(self._parts)
        if self._left_out:
            line += f"... ({self._left_out} characters left out)"
        self._parts.clear()
        self._room, self._left_out = LINE_MAX_CHARS, 0
        return line


class LoggedStream(io.TextIOBase):
    """A stream that logs text line by line; what logging itself writes goes to the original stream."""

    def __init__(self, name: str, level: int, behind: TextIO) -> None:
        self._log = logging.getLogger(name)
        self._level = level
        self._behind = behind
        self._line = _Line()  # threads do not mix their lines

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the original stream."""
        return self._behind.encoding or "utf-8"

    def writable(self) -> bool:
        """True: it is a stream for output."""
        return True

    def isatty(self) -> bool:
        """False, so that libraries write no colours into the log."""
        return False

    def fileno(self) -> int:
        """The descriptor of the original stream."""
        return self._behind.fileno()

    def write(self, text: str) -> int:
        """Log each finished line; an unfinished line waits for its end."""
        if self._line.is_logged:  # a log handler writes here: do not log that again
            return self._behind.write(text)
        start = 0
        while (end := text.find("\n", start)) >= 0:
            self._line.add(text, start, end)
            self._log_line(self._line.end())
            start = end + 1
        if start < len(text):
            self._line.add(text, start, len(text))
            UNFINISHED.add(self)
        return len(text)

    def flush(self) -> None:
        """Flush the original stream. An unfinished line is not logged, or each `print(".", end="",
        flush=True)` would log a line.
        """
        self._behind.flush()

    def end_line(self) -> None:
        """Log the unfinished line."""
        self._log_line(self._line.end())

    def _log_line(self, line: str) -> None:
        if not line.strip():
            return
        self._line.is_logged = True
        try:
            self._log.log(self._level, "%s", line.rstrip())
        finally:
            self._line.is_logged = False


UNFINISHED: set[LoggedStream] = set()  # streams with an unfinished line


def end_lines() -> None:
    """Log all unfinished lines, because the task that printed them has ended."""
    while UNFINISHED:
        UNFINISHED.pop().end_line()
