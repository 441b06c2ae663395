"""Writing: how a task of the demo writes into the ledger that it ran, in a native app and in a Celery app.

The ledger is what the tasks themselves say, one line a run, in a separate file: neither
results nor events nor workers have a hand in it, so all three can be checked against it.
"""

import os
from typing import Any

LEDGER = "DEMO_LEDGER"  # the variable that names the file


def write_run(task: Any) -> None:
    """`task` is bound; both libraries say the same of a request."""
    path = os.environ.get(LEDGER)
    if path:
        request = task.request
        kind = (request.task or "").rpartition(".")[2]
        delivered = "again" if request.delivery_info["redelivered"] else "first"
        line = f"{request.id} {kind} {request.retries} {request.hostname} {delivered}\n"
        with open(path, "ab", buffering=0) as ledger:  # one write at the end of the file is one line
            ledger.write(line.encode())
