"""Loading: find a Celery app by Celery's rules, load it like Celery's worker, and set up its logs.

Handlers of Celery's signals get stand-ins for Celery's worker, request and message objects.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from celery import VERSION, Celery, signals
from celery.app import backends
from celery.app.utils import find_app

from umbel.app.settings import Settings
from umbel.celery.configuration import settings_of
from umbel.errors import AppNotFound, ConfigurationError
from umbel.logs import JsonLines, PlainLines, limit_lines, own_log, with_fields
from umbel.pools.guard import Raised, call_guarded
from umbel.text import one_line
from umbel.wire.call import read_header_map
from umbel.wire.message import Message, delivery_info_of, properties_of

# ---- stand-ins -------------------------------------------------------------------------------------
#
# What handlers of Celery's signals get where Celery would give its worker or its request.


class WorkerStandIn:
    """The sender of `worker_init`, `worker_ready` and others. It only has `app` and `hostname`."""

    def __init__(self, app: Any, hostname: str) -> None:
        self.app = app
        self.hostname = hostname
        self.pool_cls = "prefork"  # Django's fix-up reads it to see whether children inherit connections

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a signal handler uses {name!r} of Celery's worker object, which `umbel worker` does not have; "
            "only app and hostname are available"
        )

    def __repr__(self) -> str:
        return f"<umbel worker {self.hostname}>"


class RequestStandIn:
    """The `request` of `task_received`, with those attributes of Celery's request that are about the
    message.
    """

    def __init__(self, app: Any, context: Any, message: Message) -> None:
        self.app = app
        self.message = MessageStandIn(message, "")
        self.name = self.task_name = context.shadow or context.task
        self.type = context.task
        self.task = app.tasks[context.task]
        self.request_dict = vars(context)
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, _NAMES.get(name, name))

    def __repr__(self) -> str:
        return f"<Request: {self.name}[{self._context.id}]>"


class MessageStandIn:
    """A message with kombu's attributes. It can be read, but not acknowledged."""

    def __init__(self, message: Message, queue: str) -> None:
        headers = call_guarded(read_header_map, message.headers)
        self.headers: dict[str, Any] = {} if isinstance(headers, Raised) else headers.value
        self.body = message.body
        self.content_type, self.content_encoding = message.content_type, message.content_encoding
        self.properties = properties_of(message)
        self.delivery_info = delivery_info_of(message, queue, redelivered=False)


_NAMES = {"task_id": "id"}


# ---- loading ---------------------------------------------------------------------------------------
#
# Find a Celery app by Celery's own rules, and load it the way Celery's worker does.

LOADER = "umbel.celery.host:load_host"  # what a child needs, and the main process does not
OLDEST = (5, 7)


def find_celery(target: str) -> Any | None:
    """Return the `celery.Celery` that -A TARGET names; None if there is none."""
    found = call_guarded(find_app, target)
    if isinstance(found, Raised):
        if isinstance(found.error, AttributeError | ImportError):
            return None
        raise AppNotFound(f"-A {target}: {type(found.error).__name__}: {found.error}") from found.error
    if not isinstance(found.value, Celery):
        return None
    if tuple(VERSION[:2]) < OLDEST:
        version, needed = ".".join(map(str, VERSION[:3])), ".".join(map(str, OLDEST))
        raise ConfigurationError(
            f"-A {target} is a Celery app, and Celery {version} is installed: Umbel runs Celery projects "
            f"with Celery {needed} or newer; run: pip install -U 'celery>={needed}'"
        )
    return found.value


def load(app: Any, node: str = "") -> Any:
    """Import all modules with tasks of the project. The signal `import_modules` is sent once.

    With `node`, the signal `celeryd_init` is also sent, before tasks read the settings.
    """
    if not getattr(app, "umbel_loaded", False):
        app.set_current()
        app.set_default()
        app.loader.init_worker()  # imports, and the hooks that run after them
        if node:
            arguments = {"instance": WorkerStandIn(app, node), "conf": app.conf, "options": {}}
            signals.celeryd_init.send(sender=node, **arguments)
        app.finalize()
        app.umbel_loaded = True
    return app


def worker_settings(app: Any, node: str) -> Settings:
    """Return the settings of a worker. They are read again, because handlers of the project may have changed
    them.
    """
    load(app, node)
    app.umbel_app = None  # a handler may have changed settings that were read before
    return settings_of(app)


def note_task_modules(app: Any) -> None:
    """Add the modules of all tasks to `app.conf.include`, which projects and `inspect conf` read."""
    modules = {type(task).__module__ for task in app.tasks.values()}
    app.conf.include = tuple({*app.conf.include, *modules})


def load_for_children(app: Any, node: str) -> None:
    """Load the app in the process that creates children. This is fast if the main process has loaded it
    before.
    """
    note_task_modules(load(app, node))
    # What tasks need is imported before children are forked, so that they share one copy of it.
    call_guarded(lambda: backends.by_url(app.backend_cls or app.conf.result_backend, app.loader))
    call_guarded(lambda: app.connection_for_write().get_transport_cls())
    call_guarded(lambda: (app.log, app.events))


# ---- logs of a celery project's processes ----------------------------------------------------------
#
# Set up by Celery's own code, as its settings and signals say.
#
# `worker_hijack_root_logger`, the log formats, `setup_logging`, `after_setup_logger` and the others mean
# what they mean in Celery. Umbel's own lines have the same format; their fields follow the text, and their
# rate is limited as usual.

TASKS, TRACER = "celery.task", "celery.app.trace"


class LogSettings(NamedTuple):
    """The log settings of a worker's command line."""

    level: str = "WARNING"
    logfile: str | None = None
    as_json: bool = False


def set_up(app: Any, given: LogSettings, node: str, *, child: int = 0, redirects: bool = True) -> None:
    """Set up logging in this process. `child` is 0 in the main process, else the number of the child. With
    `redirects`, printed text is logged.
    """
    if app.log.already_setup:  # by the project, or by the main process if this child is one of its threads
        return
    conf, root = app.conf, logging.getLogger()
    own = [found for found in root.handlers if isinstance(found.formatter, PlainLines | JsonLines)]
    for handler in own:
        root.removeHandler(handler)
    custom = app.log.setup(
        logging.getLevelNamesMapping()[given.level],
        given.logfile and own_log(given.logfile, node, child),
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
    """Log like Celery's main process until the worker has ended. Afterwards, output is printed again."""
    printed = sys.stdout, sys.stderr
    set_up(app, given, node)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = printed


@contextmanager
def asked_for_successes() -> Iterator[None]:
    """Make tracers that are created in this block log successes, if the log level of the child permits it.

    Celery's tracer reads the level once, when it is created. At that time, logging of the child is not set
    up yet.
    """
    logger = logging.getLogger(TRACER)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)


class FieldsBehind(logging.Formatter):
    """Wraps a formatter of Celery or the project. Umbel's log lines get their fields after the text."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted line. A message of Umbel becomes a single line with its fields."""
        if record.name.partition(".")[0] != "umbel":
            return self._inner.format(record)
        text = with_fields(one_line(record.getMessage()), record)
        return self._inner.format(logging.makeLogRecord({**vars(record), "msg": text, "args": ()}))


def _fields_behind(formatter: logging.Formatter | None) -> logging.Formatter | None:
    return formatter if formatter is None or isinstance(formatter, FieldsBehind) else FieldsBehind(formatter)
