"""Sets logging up as workers of several Celery projects do, and prints what was logged as JSON."""

import io
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from celery import Celery, signals

from umbel.celery.loading import LogSettings, in_main_process
from umbel.logs import set_up_logging


def logged(*, as_json: bool = False, project: Callable[[], None] = lambda: None, **settings: Any) -> str:
    """What comes to stderr: a line of Umbel's with a field, one of the project's, and a printed one."""
    stream: Any = io.StringIO()
    vars(sys).update(stderr=stream, __stderr__=stream)
    set_up_logging("info", as_json=as_json)
    app = Celery("project", worker_log_format="CELERY %(levelname)s %(message)s", **settings)
    app.log.already_setup = False
    project()
    with in_main_process(app, LogSettings("INFO", as_json=as_json), "w1@box"):
        logging.getLogger("umbel.worker").info("worker started", extra={"queue": "a b"})
        logging.getLogger("proj").info("of the project")
        print("printed")
    logging.getLogger().handlers = []
    return str(stream.getvalue())


def own_handler() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("OWN %(message)s"))
    logging.getLogger().addHandler(handler)


def configure(**_: Any) -> None:
    logging.getLogger().handlers = []
    own_handler()


def by_signal() -> None:
    signals.setup_logging.connect(configure, weak=False)


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, io.StringIO()
    found = {
        "hijacked": logged(project=own_handler),
        "not hijacked": logged(project=own_handler, worker_hijack_root_logger=False),
        "not redirected": logged(worker_redirect_stdouts=False),
        "json": logged(as_json=True),
        "by the signal": logged(project=by_signal),
    }
    out.write(json.dumps(found))
