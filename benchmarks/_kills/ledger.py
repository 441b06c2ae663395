"""What the ledger says: how many tasks had ended where something was killed, and ran again afterwards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks._kills.body import NUMBER_BYTES


def count_of(life: Path) -> int:
    """How many runs have ended in one life of the worker, in all its processes."""
    return sum(_numbers(file, 1)[0] for file in life.iterdir())


def ended(file: Path) -> list[int]:
    """The numbers of the tasks that ended in one process, in order."""
    return _numbers(file, 1 + _numbers(file, 1)[0])[1:]


def _numbers(file: Path, count: int) -> list[int]:
    with file.open("rb") as data:
        read = data.read(count * NUMBER_BYTES)
    return list(memoryview(read).cast("I")) if read else [0]  # made, and nothing noted yet


def repeats(killed: Sequence[Sequence[int]], rest: Sequence[int]) -> list[int]:
    """For each that was killed, in order: how many tasks that ended in it ended in a later one, or the rest.

    `rest`: what ended in whatever was not killed.
    """
    later = Counter(number for numbers in (*killed, rest) for number in numbers)
    counts: list[int] = []
    for numbers in killed:
        later.subtract(numbers)
        counts.append(sum(later[number] > 0 for number in set(numbers)))
    return counts
