"""The app of test_periodic.py: one task every second, which writes down under which id it ran, and when."""

import os
import time

from umbel import App

app = App("periodic_tasks")


@app.periodic(every=1, catch_up="all", name="beat")
@app.task(bind=True, ignore_result=True)
def beat(self) -> None:  # type: ignore[no-untyped-def]
    with open(os.environ["PERIODIC_JOURNAL"], "ab", buffering=0) as journal:  # one write is one line
        redelivered = int(self.request.delivery_info["redelivered"])
        journal.write(f"{self.request.id} {time.time()} {redelivered}\n".encode())
