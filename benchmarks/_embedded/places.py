"""Names that the benchmark, its clients and its tasks agree on, each in a process of its own."""

from pathlib import Path

HOME_VARIABLE = "BENCH_HOME"
LAST_VARIABLE = "BENCH_LAST"  # the number of a drain's last task
KEEP_VARIABLE = "BENCH_KEEP_RESULTS"
FSYNC_VARIABLE = "BENCH_HUEY_FSYNC"

DATABASE = "queue.db"


def mark_file(home: Path, number: int) -> Path:
    """Where the task of that number leaves the time at which it ran, in monotonic nanoseconds."""
    return home / f"mark-{number}"
