"""Umbel's side: an app with its default settings, apart from the file and from what becomes of results."""

import sqlite3

import umbel
from benchmarks._embedded import body
from benchmarks._embedded.places import DATABASE
from umbel import App

app = App("bench", broker=f"sqlite:///{body.HOME / DATABASE}")
noop = app.task(ignore_result=not body.KEEP_RESULTS)(body.noop)
probe = app.task(ignore_result=True)(body.probe)


def send(number: int) -> None:
    noop.delay(number)


def send_probe() -> None:
    probe.delay()


def describe() -> dict[str, str]:
    return {
        "version": umbel.__version__,
        "sqlite": sqlite3.sqlite_version,
        "delivery": "at least once",
        "synchronous": "NORMAL, and every delay() flushed to the disk before it returns",
    }
