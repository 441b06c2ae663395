"""Writing: how a task of the demo writes into the ledger that it ran, in a native app and in a Celery app.

The ledger is a separate file with one line per run, written by the task itself. Results, events and
workers have no part in it, so all three can be checked against it.
"""

import os
from typing import Any

LEDGER = "DEMO_LEDGER"  # the variable that names the file


def write_run(task: Any) -> None:
    """Append a line about this run. `task` is bound; its request has the same fields in both libraries."""
    path = os.environ.get(LEDGER)
    if path:
        request = task.request
        kind = (request.task or "").rpartition(".")[2]
        delivered = "again" if request.delivery_info["redelivered"] else "first"
        line = f"{request.id} {kind} {request.retries} {request.hostname} {delivered}\n"
        with open(path, "ab", buffering=0) as ledger:  # one write at the end of the file is one line
            ledger.write(line.encode())
