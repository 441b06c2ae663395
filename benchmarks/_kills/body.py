"""What the tasks do: note that they have ended, in a file that outlives the process.

Each process maps a separate file: first how many tasks have ended in it, then their numbers in order. A note
costs a fraction of a microsecond, and SIGKILL loses none. The directory stands for one life of the worker.
"""

import mmap
import os
import time
from pathlib import Path

URL = os.environ.get("KILLS_URL", "")
LEDGER = Path(os.environ.get("KILLS_LEDGER", "ledger"))
NUMBER_BYTES = 4
NOTES_MAX = 4_000_000  # the file is sparse

_slots: memoryview | None = None


def run(number: int, takes_s: float) -> None:
    global _slots
    if takes_s:
        time.sleep(takes_s)
    if _slots is None:
        _slots = _open()
    count = _slots[0] + 1
    _slots[count] = number
    _slots[0] = count


def _open() -> memoryview:
    with (LEDGER / str(os.getpid())).open("w+b") as file:
        file.truncate(NOTES_MAX * NUMBER_BYTES)
        return memoryview(mmap.mmap(file.fileno(), NOTES_MAX * NUMBER_BYTES)).cast("I")
