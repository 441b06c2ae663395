"""Logs of a Celery project's processes: set up by Celery's own code, as its settings and signals say.

`worker_hijack_root_logger`, the log formats, `setup_logging`, `after_setup_logger` and their like mean what
they mean in Celery. Umbel's own lines come in the same format; their fields stand behind them, and their
rate is limited as ever.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from umbel.logs import JsonLines, PlainLines, limit_lines, log_path, with_fields
from umbel.text import one_line

TASKS, TRACER = "celery.task", "celery.app.trace"


class LogSettings(NamedTuple):
    level: str = "WARNING"
    logfile: str | None = None
    as_json: bool = False


def set_up(app: Any, given: LogSettings, node: str, *, child: int = 0, redirects: bool = True) -> None:
    """`child`: 0 in the main process, else the number of the child. `redirects`: what is printed here
    belongs into the log."""
    if app.log.already_setup:  # by the project, or by the main process that this child is a thread of
        return
    conf, root = app.conf, logging.getLogger()
    own = [one for one in root.handlers if isinstance(one.formatter, PlainLines | JsonLines)]
    for handler in own:
        root.removeHandler(handler)
    custom = app.log.setup(
        logging.getLevelNamesMapping()[given.level],
        given.logfile and log_path(given.logfile, node, child),
        redirects and conf.worker_redirect_stdouts,
        conf.worker_redirect_stdouts_level,
        hostname=node,
    )
    if custom:
        return
    for handler in (*root.handlers, *logging.getLogger(TASKS).handlers):
        handler.setFormatter(JsonLines() if given.as_json else _fields_behind(handler.formatter))
        if not child:
            limit_lines(handler)


@contextmanager
def in_main_process(app: Any, given: LogSettings, node: str) -> Iterator[None]:
    """Log as Celery's main process does, until the worker has ended: then errors are printed again."""
    printed = sys.stdout, sys.stderr
    set_up(app, given, node)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = printed


@contextmanager
def asked_for_successes() -> Iterator[None]:
    """Let tracers that are made here log successes, if the level of the child that runs them allows it.

    Celery's tracer looks at the level once, when it is made; here that is before a child's log is set up.
    """
    logger = logging.getLogger(TRACER)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)


class FieldsBehind(logging.Formatter):
    """A formatter of Celery's or the project's; lines of Umbel's own have their fields behind the text."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        if record.name.partition(".")[0] != "umbel":
            return self._inner.format(record)
        text = with_fields(one_line(record.getMessage()), record)
        return self._inner.format(logging.makeLogRecord({**vars(record), "msg": text, "args": ()}))


def _fields_behind(formatter: logging.Formatter | None) -> logging.Formatter | None:
    return formatter if formatter is None or isinstance(formatter, FieldsBehind) else FieldsBehind(formatter)
