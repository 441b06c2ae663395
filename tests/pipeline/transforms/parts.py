"""What the tables are made from, in Spark's own terms: the oracle of the fold, for small lakes.

Transforms are DataFrame in, DataFrame out, one file a table; no session, no action, no Python per row.
"""

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.pipeline.transforms.marks import marks_of
from tests.pipeline.transforms.states import states_of


@dataclass(frozen=True, slots=True)
class Parts:
    states: DataFrame
    others: DataFrame
    marks: DataFrame
    events: DataFrame


def parts_of(events: DataFrame) -> Parts:
    return Parts(states_of(events), others_of(events), marks_of(events), events)


def others_of(events: DataFrame) -> DataFrame:
    """The events that are about no task: few, and kept as they are."""
    return events.where(F.col("slot").isNull())
