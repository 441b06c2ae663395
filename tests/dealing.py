"""How files of tests are dealt to the processes that run them: whole, and the longest first.

A file's tests stay in one process, because they share what its fixtures start. So do files that share
something slow: Spark, or the clusters of Umbel and Celery, which would start anew for each file.
Long files come first: at the end, a process that has nothing left waits for the other's last file.
"""

from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/pipeline", "tests/interop")
# What takes more than some seconds, in order; the rest follows by number of tests. `--durations 0` tells.
LONGEST = (*TOGETHER,)


def unit_of(file: str) -> str:
    """What is dealt as one: a file, or a folder whose files share something."""
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


def weight_of(unit: str, tests: int) -> tuple[int, int]:
    """Of two units, the one with the greater weight is dealt first."""
    place = LONGEST.index(unit) if unit in LONGEST else len(LONGEST)
    return -place, tests


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: object) -> None:
        first = max(self.workqueue, key=lambda unit: weight_of(unit, len(self.workqueue[unit])))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
