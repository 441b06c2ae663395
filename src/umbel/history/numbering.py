"""Numbering: which numbers of which sender's events are in a table of rows, for `Sequences`.

Nearly always a sender's numbers go on without a hole, which columns show at once. Where they do not they
are put in order: what is not in order within a table is no gap.
"""

from typing import Any

from umbel.events.sequences import Run, Sequences
from umbel.history.arrow import arrow, compute

_SENDER = ("hostname", "pid", "inc")


def account(sequences: Sequences, table: Any, now: float) -> None:
    ask = compute()
    numbered = table.select([*_SENDER, "seq", "timestamp"])
    numbered = numbered.filter(ask.and_(ask.is_valid(numbered["seq"]), ask.is_valid(numbered["inc"])))
    asked = [("seq", "min"), ("seq", "max"), ("seq", "count_distinct")]
    for one in numbered.group_by([*_SENDER], use_threads=False).aggregate(asked).to_pylist():
        sender = one["hostname"], one["pid"], one["inc"]
        first, last = one["seq_min"], one["seq_max"]
        is_whole = last - first + 1 == one["seq_count_distinct"]
        if is_whole and sequences.goes_on(sender, first):
            sequences.saw(sender, [(first, last, 0)], now)
            continue
        theirs = numbered
        for name, value in zip(_SENDER, sender, strict=True):
            theirs = theirs.filter(ask.equal(theirs[name], value))
        sequences.saw(sender, _runs(theirs), now)


def _runs(theirs: Any) -> list[Run]:
    """The numbers of one sender, as few runs as there are."""
    library, ask = arrow(), compute()
    ordered = theirs.sort_by("seq")
    numbers = ordered["seq"].combine_chunks()
    times = ordered["timestamp"].cast(library.int64())
    steps = ask.subtract(numbers[1:], numbers[:-1])
    begins = [0, *(place + 1 for place in ask.indices_nonzero(ask.greater(steps, 1)).to_pylist())]
    ends = [*(place - 1 for place in begins[1:]), len(numbers) - 1]
    columns = (numbers.take(begins), numbers.take(ends), times.take(begins))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
