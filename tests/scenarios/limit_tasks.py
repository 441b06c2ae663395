"""Tasks with time limits: not every pool takes them."""

from threading import Event

from umbel import App

app = App("limits")


@app.task(time_limit=0.5)
def endless() -> None:
    Event().wait(60)


@app.task(time_limit=30, soft_time_limit=0.3)
def interruptible() -> None:
    Event().wait(60)
