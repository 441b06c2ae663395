"""The tasks that every contender runs, and the ledger in which each run is one line.

Only the standard library: this also runs in Celery's environment.
"""

import os
import time
from pathlib import Path

URL = os.environ.get("FAIRNESS_URL", "")
RESULTS = os.environ.get("FAIRNESS_RESULTS") or None  # where the broker does not store results
LEDGER = Path(os.environ.get("FAIRNESS_LEDGER", "ledger"))


def run(kind: str, takes_s: float) -> int:
    """Take so long, and note when that began and ended by the machine's clock."""
    began_s = time.monotonic()
    _note(f"began {os.getpid()} {kind} {began_s}")
    if takes_s:
        time.sleep(takes_s)
    _note(f"ended {os.getpid()} {kind} {time.monotonic()}")
    return 1


def total(counts: list[int]) -> int:
    return run("body", 0.0) * sum(counts)


def _note(line: str) -> None:
    with LEDGER.open("ab", buffering=0) as ledger:  # one write each: lines of processes do not mix
        ledger.write(f"{line}\n".encode())
