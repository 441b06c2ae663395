"""D2: which files a build takes for the lake's, told without Spark."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.events.histories import attempt
from tests.pipeline.lakes import record, with_dictionaries
from umbel.events.tables import REQUIRED
from umbel.pipeline.io import look_into

HISTORY = attempt(0, "sent", "received", "started", "succeeded")


@pytest.mark.parametrize("missing", [*REQUIRED, None])
def test_a_file_of_something_else_is_named_and_not_read(tmp_path: Path, missing: str | None) -> None:
    """Its rows were events of no type in `timeline`."""
    good, path = record(tmp_path, "good", HISTORY), record(tmp_path, "foreign", HISTORY)
    foreign = pa.table({"a": [1, 2]}) if missing is None else pq.read_table(path).drop_columns([missing])
    pq.write_table(foreign, path)
    names = [one.relative_to(tmp_path).as_posix() for one in (good, path)]
    found = look_into(tmp_path, names)
    assert (found.files, found.events) == (names[:1], 4)
    [named] = found.unreadable
    assert named.name == names[1]
    assert f"no column {missing or REQUIRED[0]}" in named.why


def test_a_text_with_a_dictionary_is_a_text(tmp_path: Path) -> None:
    """Dictionaries are how Arrow had it in memory; pandas' categories are such."""
    path = with_dictionaries(record(tmp_path, "encoded", HISTORY))
    assert pa.types.is_dictionary(pq.read_schema(path).field("type").type)
    found = look_into(tmp_path, [path.relative_to(tmp_path).as_posix()])
    assert (found.events, found.unreadable) == (4, [])
