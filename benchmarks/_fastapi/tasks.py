"""The task that the site sends: each run leaves its id in the ledger of its process."""

import os
from pathlib import Path

from umbel import App

app = App(
    "site",
    broker=os.environ.get("SITE_REDIS"),
    publish_timeout_s=float(os.environ.get("SITE_TIMEOUT_S", "4")),
)


@app.task(ignore_result=True)
def note(task_id: str) -> None:
    with (Path(os.environ["SITE_LEDGER"]) / f"{os.getpid()}.txt").open("a") as ledger:
        ledger.write(task_id + "\n")
