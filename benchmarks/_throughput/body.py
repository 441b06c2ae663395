"""What the tasks of this benchmark do, the same functions for every contender.

`noop` is counted and does nothing else; `probe` says when it ran. The address of the broker and
the directory for what tasks tell come from the environment. Only the standard library: this file
is imported in the peers' environment, too.
"""

import os
from pathlib import Path

from benchmarks._harness import probing
from benchmarks._throughput.places import HOME_VARIABLE, TALLY, URL_VARIABLE
from benchmarks._throughput.tally import Tally

HOME = Path(os.environ[HOME_VARIABLE])
URL = os.environ[URL_VARIABLE]
ON_REDIS = URL.startswith("redis:")

_tally = Tally(HOME / TALLY)


def noop(_number: object) -> None:
    _tally.note()


def probe() -> None:
    probing.answer(HOME)
