"""D2: which files a build takes for the lake's, told without Spark."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.events.histories import attempt
from tests.pipeline.lakes import record
from umbel.events.columns import REQUIRED
from umbel.pipeline.files import look_into

HISTORY = attempt(0, "sent", "received", "started", "succeeded")


@pytest.mark.parametrize("missing", [*REQUIRED, None])
def test_a_file_of_something_else_is_named_and_not_read(tmp_path: Path, missing: str | None) -> None:
    """Its rows were events of no type in `timeline`."""
    good, path = record(tmp_path, "good", HISTORY), record(tmp_path, "foreign", HISTORY)
    foreign = pa.table({"a": [1, 2]}) if missing is None else pq.read_table(path).drop_columns([missing])
    pq.write_table(foreign, path)
    found = look_into([good, path])
    assert (found.files, found.events) == ([good], 4)
    [named] = found.unreadable
    assert named.path == path
    assert f"no column {missing or REQUIRED[0]}" in named.why
