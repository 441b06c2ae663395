"""Tasks of the membership scenarios: each run, and what the node hooks heard, is a line in a file."""

import os
from pathlib import Path
from typing import Any

from umbel import App

app = App("membership")
JOURNAL = "journal.txt"


def write(line: str) -> None:
    with Path(JOURNAL).open("a") as journal:
        journal.write(line + "\n")


@app.task
def note(text: str) -> None:
    write(f"ran {text}")


@app.signals.on_node_join.connect
@app.signals.on_node_leave.connect
@app.signals.on_node_lost.connect
def fail(**_: Any) -> None:
    raise LookupError("a hook that raises does not stop the others")


@app.signals.on_node_join.connect
def joined(node: str, software: str, **_: Any) -> None:
    write(f"{os.getpid()} saw {node.partition('@')[0]} join ({software})")


@app.signals.on_node_leave.connect
def left(node: str, reason: str, **_: Any) -> None:
    write(f"{os.getpid()} saw {node.partition('@')[0]} leave ({reason})")


@app.signals.on_node_lost.connect
def lost(node: str, **_: Any) -> None:
    write(f"{os.getpid()} saw {node.partition('@')[0]} lost")
