"""Every reader of bytes that others wrote, under inputs that a seeded mutator makes of the corpus (N1).

Tasks, control requests, replies, events, results and frames; what is signed; letters, state files, rows of
an outbox, files of a lake. `make soak` reads a million, `make test` a few thousand. None ends the process,
none runs code that a pickle holds and nobody signed, and together they leave no memory behind. A failure
prints the seed, the number of the input and the input as a line of the corpus; `FUZZ_SEED=… FUZZ_FIRST=…`
begins there again.
"""

import gc
import os
import random
import resource
from collections import Counter
from pathlib import Path

import pytest

from tests.corpus.case import BROKERS, as_line
from tests.corpus.readers import REFUSALS, read_case
from tests.fuzz.mutator import Mutator
from tests.fuzz.stored import EXPLODED, REFUSED, STORED, Stored

SOAK = bool(os.environ.get("UMBEL_SOAK"))
INPUTS = int(os.environ.get("FUZZ_INPUTS") or (1_000_000 if SOAK else 10_000))
SEED = int(os.environ.get("FUZZ_SEED") or random.randrange(2**31))
FIRST = int(os.environ.get("FUZZ_FIRST") or 0)
FAILURES_MAX = 20  # enough to see the classes
GROWTH_MAX_BYTES = 64 * 2**20  # from when a fifth is read: what grows with the inputs grows further


@pytest.mark.timeout(3600)
def test_whatever_bytes_a_reader_is_given_it_returns_a_value_or_raises_its_own_error(tmp_path: Path) -> None:
    mutator, stored, counts = Mutator(SEED, brokers=BROKERS), Stored(tmp_path), Counter[str]()
    wrong: dict[str, str] = {}
    warm_at, warm = FIRST + INPUTS // 5, 0
    for number in range(FIRST, FIRST + INPUTS):
        broker, case = mutator.input(number)
        counts[case.kind] += 1
        if number == warm_at:
            warm = resident_bytes()
        try:
            if case.kind in STORED:
                stored.read(case)
            else:
                read_case(case, broker)
        except (*REFUSALS, *REFUSED):
            continue
        except Exception as error:
            said = f"FUZZ_SEED={SEED} FUZZ_FIRST={number}, {broker}, {case.kind}\n{as_line(case)}"
            wrong.setdefault(f"{type(error).__name__}: {error!s:.60}", said)
            if len(wrong) == FAILURES_MAX:
                break
    grown = resident_bytes() - warm
    print(f"seed {SEED}: {INPUTS} inputs, {dict(counts)}; memory grew by {grown / 1e6:.1f} MB")
    stored.close()
    assert not wrong, "\n".join(f"{what}\n{said}" for what, said in wrong.items())
    assert not EXPLODED, f"code of an unsigned pickle ran; FUZZ_SEED={SEED}"
    assert grown < GROWTH_MAX_BYTES
    assert {*STORED, "task", "control", "reply", "event", "result", "frame"} <= counts.keys()


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_an_input_is_known_by_its_seed_and_number() -> None:
    one, other = Mutator(7, brokers=BROKERS), Mutator(7, brokers=BROKERS)
    assert [one.input(number) for number in range(50)] == [other.input(number) for number in range(50)]
    assert len({one.input(number)[1].body for number in range(200)}) > 50


def test_the_mutator_reaches_what_lies_behind_the_first_check() -> None:
    """Else a million inputs would be refused at the door, and prove nothing of the rooms."""
    mutator, read = Mutator(1, "task", brokers=BROKERS), 0
    for number in range(2000):
        broker, case = mutator.input(number)
        try:
            read_case(case, broker)
        except REFUSALS:
            continue
        except Exception:
            continue
        read += 1
    assert 200 < read < 1900
