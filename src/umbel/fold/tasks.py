"""Tasks: one row a task, the view of its registers."""

import pyarrow as pa

from umbel.events.precedence import ENDINGS
from umbel.events.view import TIMED
from umbel.fold import view
from umbel.fold.columns import instants
from umbel.fold.registers import SLOT, Joined, Known
from umbel.fold.schemas import made

DESCRIBED = ("name", "args", "kwargs", "root_id", "parent_id", "eta", "expires")


def tasks(joined: Joined, ids: pa.Array) -> pa.Table:
    """`ids`: the texts of the tasks' numbers."""
    known, firsts = joined.tasks, joined.firsts
    winner, described = view.Winner(known), view.Described(known)
    by = {slot: known.of(slot) for slot in TIMED}
    sent, succeeded, revoked, error = by["sent"], by["succeeded"], by["revoked"], view.error(known)
    return made(
        "tasks",
        {
            "task_id": ids.take(pa.array(known.task)),
            "state": winner.state(),
            "state_at": winner.settled("timestamp"),
            "clock": winner.settled("clock"),
            "worker": winner.worker().text("hostname"),
            **{name: described.by(name).take(name) for name in DESCRIBED},
            "retries": pa.array(known.told.max(axis=1)),
            "client": sent.text("hostname"),
            **{name: sent.take(name) for name in ("queue", "exchange", "routing_key")},
            **{name: succeeded.take(name) for name in ("result", "runtime")},
            **{name: error.take(name) for name in ("exception", "traceback")},
            **{name: revoked.take(name) for name in ("terminated", "signum", "expired")},
            "requeue": by["rejected"].take("requeue"),
            **{f"{slot}_at": rows.settled("timestamp") for slot, rows in by.items()},
            **{f"first_{slot}_at": instants(firsts[:, SLOT[slot]], rows.there) for slot, rows in by.items()},
            "n_deliveries": pa.array(known.n_deliveries),
            "n_terminal": pa.array(known.n_terminal),
            "extra": winner.take("extra"),
            "wait_s": _wait_s(known, described),
            "run_s": _run_s(known, winner),
        },
    )


def _wait_s(known: Known, described: view.Described) -> pa.Array:
    """Of the attempt that started last: events of another attempt do not say how long it waited."""
    number = known.attempt_of("started")
    sent = known.of("sent").where(known.told_by("sent") == number)
    received = known.of("received").where(known.attempt_of("received") == number)
    return view.wait_s(sent, received, known.of("started"), described)


def _run_s(known: Known, winner: view.Winner) -> pa.Array:
    is_ended = winner.is_of(*ENDINGS) & (known.attempt_of("started") == winner.attempt)
    measured = known.of("succeeded").where(winner.is_of("succeeded"))
    return view.run_s(measured, known.of("started").where(is_ended), winner)
