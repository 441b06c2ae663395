"""Groups: rows that agree in some columns, numbered; and what is running within such groups."""

import numpy as np
import pyarrow as pa

from umbel.fold.columns import Ints


def groups(*columns: pa.Array) -> tuple[Ints, Ints]:
    """The number of each row's group, and the first row of each group. Null is a value like others."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        wide = number * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        number = pa.array(wide).dictionary_encode().indices.to_numpy().astype(np.int64)
    firsts = np.zeros(int(number.max()) + 1 if len(number) else 0, dtype=np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    return number, firsts


def starts_of(groups_in_order: Ints) -> Ints:
    """Where each group begins, of rows that lie by group."""
    if not len(groups_in_order):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(groups_in_order[1:] != groups_in_order[:-1]) + 1])


def running_max(values: Ints, groups_in_order: Ints) -> Ints:
    """The greatest value so far within each group, of rows that lie by group, groups ascending."""
    if ((values[1:] >= values[:-1]) | (groups_in_order[1:] != groups_in_order[:-1])).all():
        return values
    distinct, rank = np.unique(values, return_inverse=True)
    above = groups_in_order * len(distinct)
    return distinct[np.maximum.accumulate(rank + above) - above]
