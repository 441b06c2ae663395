"""What the tasks of this benchmark do, the same functions for every contender.

`noop` does nothing but leave the time when it is the first or the last of a drain: two tasks of
thousands, so what is measured is the queue. `probe` says when it ran, see `_harness/probing.py`.
Both use the monotonic clock, which all processes of a machine share. Only the standard library:
this file is imported in the peers' environment, too.
"""

import os
import time
from pathlib import Path

from benchmarks._embedded.places import HOME_VARIABLE, KEEP_VARIABLE, LAST_VARIABLE, mark_file
from benchmarks._harness import probing

HOME = Path(os.environ[HOME_VARIABLE])
KEEP_RESULTS = os.environ.get(KEEP_VARIABLE) == "1"

_MARKED = {0, int(os.environ.get(LAST_VARIABLE, "0"))}


def noop(number: int) -> None:
    if number in _MARKED:
        _mark(number)


def probe() -> None:
    probing.answer(HOME)


def _mark(number: int) -> None:
    draft = HOME / f"draft-{number}"
    draft.write_text(str(time.monotonic_ns()))
    draft.replace(mark_file(HOME, number))
