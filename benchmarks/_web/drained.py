"""Tasks that do nothing, for a worker that is watched."""

import os

from umbel import App

app = App("watched", broker=os.environ["BENCH_URL"], task_ignore_result=True)


@app.task
def noop() -> None:
    pass
