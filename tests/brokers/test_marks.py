"""What a node's mark says of one run of it."""

import pytest

from umbel.brokers.interface import Evidence, judge_mark


@pytest.mark.parametrize(
    ("found", "asked", "evidence"),
    [
        (0, 0, Evidence.UNKNOWN),
        (0, 7, Evidence.UNKNOWN),
        (7, 0, Evidence.ALIVE),
        (7, 7, Evidence.ALIVE),
        (8, 7, Evidence.GONE),  # it was started again
        (6, 7, Evidence.UNKNOWN),  # the mark of the run before
    ],
)
def test_a_mark_proves_that_its_run_lives_and_earlier_ones_do_not(
    found: int, asked: int, evidence: Evidence
) -> None:
    assert judge_mark(found, asked) is evidence
