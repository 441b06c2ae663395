"""The app of test_periodic.py: one task every second, which writes down under which id it ran."""

import os

from umbel import App

app = App("periodic_tasks")


@app.periodic(every=1, catch_up="all", name="beat")
@app.task(bind=True, ignore_result=True)
def beat(self) -> None:  # type: ignore[no-untyped-def]
    with open(os.environ["PERIODIC_JOURNAL"], "a", encoding="utf-8") as journal:
        journal.write(f"{self.request.id}\n")
