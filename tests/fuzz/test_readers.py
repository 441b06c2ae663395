"""The readers of the wire under inputs that a seeded mutator makes of the corpus (N1).

`make soak` reads a million, `make test` a few thousand. A failure prints the seed, the number of the
input and the input as a file of the corpus; `FUZZ_SEED=… FUZZ_FIRST=…` begins there again.
"""

import os
import random

import pytest

from tests.corpus.case import BROKERS, as_file
from tests.corpus.readers import REFUSALS, read_case
from tests.fuzz.mutator import Mutator

SOAK = bool(os.environ.get("UMBEL_SOAK"))
INPUTS = int(os.environ.get("FUZZ_INPUTS") or (1_000_000 if SOAK else 10_000))
SEED = int(os.environ.get("FUZZ_SEED") or random.randrange(2**31))
FIRST = int(os.environ.get("FUZZ_FIRST") or 0)
FAILURES_MAX = 20  # enough to see the classes


@pytest.mark.timeout(3600)
def test_whatever_bytes_a_reader_is_given_it_returns_a_value_or_raises_its_own_error() -> None:
    mutator = Mutator(SEED, brokers=BROKERS)
    wrong: dict[str, str] = {}
    for number in range(FIRST, FIRST + INPUTS):
        broker, case = mutator.input(number)
        try:
            read_case(case, broker)
        except REFUSALS:
            continue
        except Exception as error:
            said = f"FUZZ_SEED={SEED} FUZZ_FIRST={number}, {broker}\n{as_file(case)}"
            wrong.setdefault(f"{type(error).__name__}: {error!s:.60}", said)
            if len(wrong) == FAILURES_MAX:
                break
    print(f"seed {SEED}: {INPUTS} inputs")
    assert not wrong, "\n".join(f"{what}\n{said}" for what, said in wrong.items())


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
