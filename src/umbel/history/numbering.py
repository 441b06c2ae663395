"""Numbering: which numbers of which sender's events are in a table of rows, for `Sequences`.

Nearly always a sender's numbers go on without a hole, which columns show at once. Only where they
do not are they passed one by one, in their order: what is not in order within a table is no gap.
"""

from typing import Any

from umbel.events.sequences import Sequences
from umbel.history.arrow import arrow, compute

_SENDER = ("hostname", "pid", "inc")


def account(sequences: Sequences, table: Any, now: float) -> None:
    library, ask = arrow(), compute()
    numbered = table.select([*_SENDER, "seq", "timestamp"])
    numbered = numbered.filter(ask.and_(ask.is_valid(numbered["seq"]), ask.is_valid(numbered["inc"])))
    asked = [("seq", "min"), ("seq", "max"), ("seq", "count_distinct")]
    for one in numbered.group_by([*_SENDER], use_threads=False).aggregate(asked).to_pylist():
        sender = one["hostname"], one["pid"], one["inc"]
        first, last = one["seq_min"], one["seq_max"]
        is_whole = last - first + 1 == one["seq_count_distinct"]
        if is_whole and sequences.saw_run(sender, first, last):
            continue
        theirs = numbered
        for name, value in zip(_SENDER, sender, strict=True):
            theirs = theirs.filter(ask.equal(theirs[name], value))
        theirs = theirs.sort_by("seq")
        times = theirs["timestamp"].cast(library.int64()).to_pylist()
        numbers = theirs["seq"].to_pylist()
        sequences.saw([(*sender, seq, at_us) for seq, at_us in zip(numbers, times, strict=True)], now)
