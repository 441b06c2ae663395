"""Logging in a child: what a task logs looks like the worker's own lines, and names the task.

An app that has set up logging for itself keeps what it set up.
"""

import logging

from umbel.app.request import current_request
from umbel.pools.interface import ChildContext
from umbel.worker.logs import set_up_logging


def set_up_child_logging(context: ChildContext) -> None:
    root = logging.getLogger()
    if root.handlers:
        return
    set_up_logging(context.loglevel, logfile=context.logfile, as_json=context.log_json)
    for handler in root.handlers:
        handler.addFilter(_name_the_task)


def _name_the_task(record: logging.LogRecord) -> bool:
    request = current_request()
    if request is not None:
        record.task, record.task_id = request.task, request.id
    return True
