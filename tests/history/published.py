"""A lake with published tables, made without Spark: rows in, Parquet and a manifest out."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import TABLES, Table

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
BEGAN = datetime(2026, 11, 15, 9, 0, tzinfo=UTC)
ARROW = {
    "text": pa.string(),
    "json": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "instant": pa.timestamp("us", tz="UTC"),
}


def publish(lake: Path, rows: Rows, *, number: int = 1, **facts: Any) -> Path:
    """Write every table as one build and publish it; a table without rows gets a file too."""
    files: dict[str, list[str]] = {}
    for name, table in TABLES.items():
        path = lake / "tables" / f"b{number}" / name / "part-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(as_arrow(table, rows.get(name, ())), path)
        files[name] = [path.relative_to(lake / "tables").as_posix()]
    manifest = lake / "tables" / "_manifest" / f"{number:06d}.json"
    manifest.parent.mkdir(exist_ok=True)
    told = {"build": f"b{number}", "tables": files, "lake_version": 1, "built_at": BEGAN.isoformat(), **facts}
    manifest.write_text(json.dumps(told))
    return lake


def as_arrow(table: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    assert all(set(row) <= set(table.names) for row in rows), "a row has columns of its table only"
    schema = pa.schema([(column.name, ARROW[column.kind]) for column in table.columns])
    return pa.table({name: [row.get(name) for row in rows] for name in table.names}, schema=schema)


class Story:
    """An hour of a small shop: three workers, one of which is lost, retries, failures, an election."""

    WORKERS = ("w1@shop", "w2@shop", "w3@shop")
    NAMES = ("shop.pack", "shop.pay", "mail.send", "stats.fold")

    def __init__(self, tasks: int = 600, seed: int = 7) -> None:
        self._random = Random(seed)
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        for number in range(tasks):
            self._task(f"{number:08x}-task", number * 3600 / tasks)
        self._workers()
        self._elections()
        self._anomalies()

    def _task(self, uuid: str, sent_s: float) -> None:
        random = self._random
        name = random.choices(self.NAMES, (8, 4, 2, 1))[0]
        fails = name == "shop.pay" and random.random() < 0.2
        attempts = 2 if random.random() < 0.06 else 1
        sent, clock = BEGAN + timedelta(seconds=sent_s), int(sent_s * 10)
        for attempt in range(attempts):
            worker = random.choice(self.WORKERS)
            wait_s, run_s = random.lognormvariate(-3, 1), random.lognormvariate(-1, 1)
            started = sent + timedelta(seconds=wait_s)
            ended = started + timedelta(seconds=run_s)
            last = attempt == attempts - 1
            outcome = "RETRY" if not last else "FAILURE" if fails else "SUCCESS"
            row = {
                "task_id": uuid,
                "attempt": attempt,
                "state": outcome,
                "state_at": ended,
                "clock": clock + 3,
                "worker": worker,
                "pid": 10,
                "name": name,
                "queue": "celery",
                "sent_at": sent,
                "received_at": started,
                "started_at": started,
                "ended_at": ended,
                "outcome": outcome,
                "exception": None if outcome == "SUCCESS" else "ValueError('no customer')",
                "n_deliveries": 1,
                "n_terminal": int(last),
                "out_of_order": False,
                "wait_s": wait_s,
                "run_s": run_s,
            }
            self.rows["attempts"].append(row)
            self._tell(uuid, attempt, clock, row)
            if last:
                left = ("attempt", "pid", "outcome", "ended_at", "out_of_order")
                task = {key: value for key, value in row.items() if key not in left}
                self.rows["tasks"].append(task | {"retries": attempt, "first_sent_at": sent})
            sent, clock = ended, clock + 5

    def _tell(self, uuid: str, attempt: int, clock: int, row: Mapping[str, Any]) -> None:
        ending = {"SUCCESS": "task-succeeded", "FAILURE": "task-failed", "RETRY": "task-retried"}[
            row["outcome"]
        ]
        told = (
            ("task-sent", row["sent_at"], 0, "shop@client"),
            ("task-received", row["received_at"], clock + 1, row["worker"]),
            ("task-started", row["started_at"], clock + 2, row["worker"]),
            (ending, row["ended_at"], clock + 3, row["worker"]),
        )
        for rank, (kind, at, lamport, host) in enumerate(told, start=1 + 4 * attempt):
            skew = timedelta(seconds=0.3) if host == "w2@shop" else timedelta()
            self.rows["timeline"].append(
                {
                    "subject": uuid,
                    "rank": rank,
                    "task_id": uuid,
                    "attempt": attempt,
                    "type": kind,
                    "timestamp": at,
                    "clock": lamport,
                    "hostname": host,
                    "pid": 10,
                    "digest": hash((uuid, rank)),
                    "detail": row["name"],
                    "recorded_at": at - skew + timedelta(milliseconds=5),
                }
            )

    def _workers(self) -> None:
        for number, (worker, start_s, end_s, ending) in enumerate(
            [
                ("w1@shop", 0, 3600, "alive"),
                ("w2@shop", 0, 1500, "lost"),
                ("w2@shop", 1560, 3600, "alive"),
                ("w3@shop", 300, 3300, "offline"),
            ]
        ):
            last = BEGAN + timedelta(seconds=end_s)
            self.rows["workers"].append(
                {
                    "hostname": worker,
                    "pid": 10 + number,
                    "inc": number,
                    "session": 1,
                    "online_at": BEGAN + timedelta(seconds=start_s),
                    "last_at": last,
                    "ended_at": None if ending == "alive" else last,
                    "ending": ending,
                    "up_s": float(end_s - start_s),
                    "clock_min": start_s * 10,
                    "clock_max": end_s * 10,
                    "n_beats": (end_s - start_s) // 2,
                    "freq": 2.0,
                    "active_max": 2,
                    "processed": 100,
                    "sw_ident": "umbel",
                    "sw_ver": "0.1",
                    "sw_sys": "Linux",
                }
            )

    def _elections(self) -> None:
        for number, (topic, outcome) in enumerate([("task", "done"), ("reindex", "failed")]):
            at = BEGAN + timedelta(seconds=600 * (number + 1))
            self.rows["elections"].append(
                {
                    "election_id": f"e{number}",
                    "protocol": "v2",
                    "topic": topic,
                    "winner": "w1@shop",
                    "term": number + 1,
                    "outcome": outcome,
                    "policy": "retry",
                    "n_candidates": 1,
                    "candidates": "[]",
                    "n_acks": 0,
                    "attempts": 1,
                    "first_at": at,
                    "last_at": at + timedelta(seconds=0.04),
                    "duration_s": 0.04,
                    "violations": "[]",
                }
            )

    def _anomalies(self) -> None:
        self.rows["anomalies"].append(
            {
                "kind": "time_skew",
                "subject": "w2@shop",
                "at": BEGAN,
                "worker": "w2@shop",
                "pid": 11,
                "n": 1,
                "detail": "its time is 0.3 s ahead of the broker's",
            }
        )
