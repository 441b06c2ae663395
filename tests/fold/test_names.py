"""D2: which bucket a file of the lake is of, by its name."""

import pytest

from umbel.fold import Place, bucket_file, marks_file, others_file, place_of

GROUP = "compacted/dt=2026-11-15/co-1794700800000000-000000"


def test_a_name_says_where_a_file_belongs() -> None:
    assert place_of(bucket_file(GROUP, 3, 16)) == Place(GROUP, 3, 16)
    assert place_of(bucket_file(GROUP, 1023, 1024)) == Place(GROUP, 1023, 1024)
    assert place_of(others_file(GROUP)) == Place(GROUP, None, 0)
    assert bucket_file(GROUP, 3, 16) == f"{GROUP}-b003of016.parquet"


@pytest.mark.parametrize(
    "name",
    [
        marks_file(GROUP),
        f"{GROUP}.parquet",  # of an earlier version
        "events/dt=2026-11-15/hour=07/ev-r-1-000001.parquet",
        f"{GROUP}-b016of016.parquet",
        f"{GROUP}-b001of003.parquet",
        f"{GROUP}-b001of016.parquet.tmp",
    ],
)
def test_other_files_are_loose(name: str) -> None:
    assert place_of(name) is None
