"""A task that writes down which transaction sent it; and a program that sends it in transactions.

The program takes the address of the database, the number of its first transaction and of the one to stop at.
Every third transaction is rolled back; every other leaves its number and the ids of its tasks in the table
`ledger`.
"""

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import psycopg

from umbel import App, Task

app = App("shop")
TASKS = 2  # of a transaction


@app.task(bind=True)
def ship(self: Task[..., Any], file: str) -> None:
    with Path(file).open("a") as runs:
        again = "again" if self.request.delivery_info["redelivered"] else "first"
        runs.write(f"{self.request.id} {again}\n")


def send(url: str, file: str, first: int, end: int) -> None:
    mark = "?" if url.startswith("sqlite") else "%s"
    connection: Any = connect(url)
    for number in range(first, end):
        with app.outbox(connection):
            for _ in range(TASKS):
                task_id = ship.delay(file).id
                values = (number, task_id)
                connection.execute(f"INSERT INTO ledger VALUES ({mark}, {mark})", values)
        connection.rollback() if number % 3 == 1 else connection.commit()
    connection.close()


def connect(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    return psycopg.connect(url)


if __name__ == "__main__":
    send(os.environ["UMBEL_OUTBOX"], sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
