"""Huey's side: its SQLite storage with its default settings, apart from the file.

`BENCH_HUEY_FSYNC=0` is its one setting that trades safety for speed, `fsync=False`.
"""

import os
import sqlite3
from typing import Any

import huey as peer

from benchmarks._embedded import body
from benchmarks._embedded.places import DATABASE, FSYNC_VARIABLE

SYNCHRONOUS = ("OFF: nothing waits for the disk", "NORMAL", "FULL: every commit waits for the disk")

_chosen: dict[str, Any] = {"fsync": os.environ[FSYNC_VARIABLE] == "1"} if FSYNC_VARIABLE in os.environ else {}
if body.KEEP_RESULTS:
    _chosen["store_none"] = True

huey = peer.SqliteHuey("bench", filename=str(body.HOME / DATABASE), **_chosen)
noop = huey.task()(body.noop)
probe = huey.task()(body.probe)


def send(number: int) -> None:
    noop(number)


def send_probe() -> None:
    probe()


def describe() -> dict[str, str]:
    level: int = huey.storage.conn.execute("PRAGMA synchronous").fetchone()[0]
    return {
        "version": peer.__version__,
        "sqlite": sqlite3.sqlite_version,
        "delivery": "at most once",
        "synchronous": SYNCHRONOUS[level],
    }
