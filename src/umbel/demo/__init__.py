"""The demo: runs a cluster on this machine under load and failures, and checks the results."""

import os
from typing import Any

# ---- ledger ----------------------------------------------------------------------------------------
#
# Record in the ledger that a task ran, for native tasks and for Celery tasks.
#
# The ledger is a file with a line for each run, which the task itself writes. It does not depend on results,
# events or workers, so it is an independent check of all three.

LEDGER = "DEMO_LEDGER"  # the environment variable with the path of the file


def write_run(task: Any) -> None:
    """Append a line about this run. `task` is the bound task; its request has the same fields in Umbel and
    Celery.
    """
    path = os.environ.get(LEDGER)
    if path:
        request = task.request
        kind = (request.task or "").rpartition(".")[2]
        delivered = "again" if request.delivery_info["redelivered"] else "first"
        line = f"{request.id} {kind} {request.retries} {request.hostname} {delivered}\n"
        # a single write in append mode, so that lines of processes do not mix
        with open(path, "ab", buffering=0) as ledger:
            ledger.write(line.encode())
