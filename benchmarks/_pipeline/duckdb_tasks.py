"""The table `tasks` by DuckDB: the same registers and the same view as the pipeline's, in SQL.

It is the measure that Spark is held to, on one machine, on the same files, in the same run: so it
must say exactly the same, which a test compares row by row.
"""

from collections.abc import Sequence
from pathlib import Path

import duckdb

from benchmarks._pipeline.registers import ORDER, register_fields
from umbel.events.merge import DIGESTS_MAX
from umbel.events.precedence import ATTEMPT_STEP, ENDED, ENDINGS, STATES, STRENGTHS
from umbel.events.tables import TABLES
from umbel.events.types import SLOTS, TASK_PREFIX
from umbel.events.view import TIMED

ENDINGS_MAX = DIGESTS_MAX * len(ENDINGS)
ENDED_IN = ", ".join(f"'{slot}'" for slot in sorted(ENDINGS))


def write_tasks(files: Sequence[Path], target: Path, *, memory: str = "6GB") -> None:
    connection = duckdb.connect(
        ":memory:", config={"memory_limit": memory, "temp_directory": str(target.parent / "spill")}
    )
    try:
        connection.execute("set TimeZone='UTC'")
        connection.execute("set preserve_insertion_order=false")
        connection.execute(f"copy ({query(files)}) to '{target}' (format parquet, compression zstd)")
    finally:
        connection.close()


def query(files: Sequence[Path]) -> str:
    listed = ", ".join(f"'{path}'" for path in files)
    return f"""
with events as (
    select * replace (coalesce(retries, 0) as attempt) from read_parquet([{listed}])
    where uuid is not null and slot in ({", ".join(f"'{slot}'" for slot in SLOTS)})
),
known as (
    select uuid, {", ".join(map(_register, SLOTS))},
        {", ".join(f"min(timestamp) filter (slot = '{slot}') as first_{slot}" for slot in TIMED)},
        least(count(distinct digest) filter (slot = 'received'), {DIGESTS_MAX}) as n_deliveries,
        least(count(distinct digest) filter (slot in ({ENDED_IN})), {ENDINGS_MAX}) as n_terminal
    from events group by uuid
),
judged as (select *, greatest({", ".join(map(_ranked, SLOTS))}) as winner from known)
select {", ".join(f"{_columns()[name]} as {name}" for name in TABLES["tasks"].names)} from judged"""


def _register(slot: str) -> str:
    fields = ", ".join(f"{name} := {name}" for name in register_fields(slot))
    return f"max(struct_pack({fields})) filter (slot = '{slot}') as {slot}"


def _attempt(slot: str) -> str:
    """The attempt that a register belongs to, said or read from the receipt."""
    return (
        f"coalesce({slot}.retries, case when received is null then 0"
        f" when {slot}.clock >= received.clock then received.attempt"
        f" else greatest(0, received.attempt - 1) end)"
    )


def _ranked(slot: str) -> str:
    step = 1 if slot == "retried" else 0
    rank = (
        str(ENDED + STRENGTHS[slot])
        if slot in ENDINGS
        else f"({_attempt(slot)} + {step}) * {ATTEMPT_STEP} + {STRENGTHS[slot]}"
    )
    state = (
        f"'{STATES[slot]}'" if slot in STATES else f"upper(substring({slot}.type, {len(TASK_PREFIX) + 1}))"
    )
    fields = ", ".join(
        f"{name} := {slot}.{name}" for name in ("timestamp", "clock", "hostname", "pid", "extra")
    )
    return (
        f"case when {slot} is not null then struct_pack(rank := ({rank})::bigint,"
        f" attempt := {_attempt(slot)}, state := {state}, slot := '{slot}', {fields}) end"
    )


def _described(name: str) -> str:
    return (
        f"case when sent.attempt > received.attempt then coalesce(sent.{name}, received.{name})"
        f" else coalesce(received.{name}, sent.{name}) end"
    )


def _seconds(start: str, end: str) -> str:
    return f"(epoch_us({end}) - epoch_us({start})) / 1000000"


def _columns() -> dict[str, str]:
    started = _attempt("started")
    sent = f"case when sent.attempt = {started} then sent.timestamp end"
    eta = f"try_cast({_described('eta')} as timestamptz)"
    due = f"case when ({sent}) is not null then list_max([{sent}, {eta}]) end"
    received = f"case when {_attempt('received')} = {started} then received.timestamp end"
    wait = _seconds(f"coalesce({due}, {received})", "started.timestamp")
    is_ended = f"winner.slot in ({ENDED_IN}) and {started} = winner.attempt"
    runtime = "case when winner.slot = 'succeeded' then succeeded.runtime end"
    run = _seconds(f"(case when {is_ended} then started.timestamp end)", "winner.timestamp")
    measured = f"case when {runtime} between 0 and 1e12 then {runtime} end"
    spanned = f"case when {run} is not null then greatest(0, {run}) end"
    return {
        "task_id": "uuid",
        "state": "winner.state",
        "state_at": "winner.timestamp",
        "clock": "winner.clock",
        "worker": "case when winner.slot <> 'sent' then winner.hostname end",
        **{
            name: _described(name)
            for name in ("name", "args", "kwargs", "root_id", "parent_id", "eta", "expires")
        },
        "retries": f"list_max([{', '.join(f'{slot}.attempt' for slot in SLOTS)}])",
        "client": "sent.hostname",
        **{name: f"sent.{name}" for name in ("queue", "exchange", "routing_key")},
        **{name: f"succeeded.{name}" for name in ("result", "runtime")},
        **{
            name: f"case when failed is not null then failed.{name} else retried.{name} end"
            for name in ("exception", "traceback")
        },
        **{name: f"revoked.{name}" for name in ("terminated", "signum", "expired")},
        "requeue": "rejected.requeue",
        **{f"{slot}_at": f"{slot}.timestamp" for slot in TIMED},
        **{f"first_{slot}_at": f"first_{slot}" for slot in TIMED},
        "n_deliveries": "n_deliveries",
        "n_terminal": "n_terminal",
        "extra": "winner.extra",
        "wait_s": f"case when {wait} is not null then greatest(0, {wait}) end",
        "run_s": f"coalesce({measured}, {spanned})",
    }


assert ORDER[0] == "attempt", "a register begins with the order of events"
