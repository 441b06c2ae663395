"""Attempts: one row for each attempt of each task, the view of what is known of it."""

import numpy as np
import pyarrow as pa

from umbel.fold import view
from umbel.fold.columns import NOTHING, Flags, Ints, Rows
from umbel.fold.registers import SLOT, Joined, Known
from umbel.fold.schemas import made

_ENDS = ("succeeded", "failed", "revoked", "retried", "rejected")
"""An attempt's outcome is the first of these that was reported."""

_TASK_OF = ("name", "root_id", "parent_id")


def attempts(joined: Joined, ids: pa.Array) -> pa.Table:
    """`ids`: the texts of the tasks' numbers. What an attempt's events lack, those of its task describe."""
    known, whole = joined.attempts, joined.tasks.at(joined.owner)
    winner, described = view.Winner(known), view.Described(known)
    of_task, worker, (end, outcome) = view.Described(whole), winner.worker(), _end(known)
    sent, received, started = known.of("sent"), known.of("received"), known.of("started")
    return made(
        "attempts",
        {
            "task_id": ids.take(pa.array(known.task)),
            "attempt": pa.array(joined.attempt),
            "state": winner.state(),
            "state_at": winner.settled("timestamp"),
            "clock": winner.settled("clock"),
            "worker": worker.text("hostname"),
            "pid": worker.settled("pid"),
            **{name: described.by(name).or_else(of_task.by(name), name).take(name) for name in _TASK_OF},
            "queue": sent.or_else(whole.of("sent"), "queue").take("queue"),
            "client": sent.or_else(whole.of("sent")).text("hostname"),
            "sent_at": sent.settled("timestamp"),
            "received_at": received.settled("timestamp"),
            "started_at": started.settled("timestamp"),
            "ended_at": end.settled("timestamp"),
            "outcome": view.states_of(end, outcome),
            "received_clock": received.settled("clock"),
            "started_clock": started.settled("clock"),
            "ended_clock": end.settled("clock"),
            "runtime": known.of("succeeded").take("runtime"),
            "exception": view.error(known).take("exception"),
            "n_deliveries": pa.array(known.n_deliveries),
            "n_terminal": pa.array(known.n_terminal),
            "out_of_order": pa.array(_is_out_of_order(known, received, started, end)),
            "wait_s": view.wait_s(sent, received, started, described),
            "run_s": view.run_s(known.of("succeeded"), started, end),
        },
    )


def _end(known: Known) -> tuple[Rows, Ints]:
    """The event that ended an attempt, and its type."""
    rows = np.full(len(known.task), NOTHING)
    slots = np.zeros(len(known.task), dtype=np.int64)
    for slot in reversed(_ENDS):
        found = known.rows[:, SLOT[slot]]
        rows, slots = np.where(found >= 0, found, rows), np.where(found >= 0, SLOT[slot], slots)
    return Rows(known.events, rows), slots


def _is_out_of_order(known: Known, received: Rows, started: Rows, end: Rows) -> Flags:
    hosts = known.events.codes("hostname")

    def against(earlier: Rows, later: Rows) -> Flags:
        """Whether one process reported the later before the earlier, by its own clock; 0 does not count."""
        both = np.flatnonzero(earlier.there & later.there & (later.ints("clock") < earlier.ints("clock")))
        one, other = earlier.rows[both], later.rows[both]
        pid, clock = known.events.ints("pid"), known.events.ints("clock")
        found = np.zeros(len(earlier.rows), dtype=bool)
        found[both] = (hosts[one] == hosts[other]) & (pid[one] == pid[other]) & (clock[other] > 0)
        return found

    return against(received, started) | against(started, end) | against(received, end)
