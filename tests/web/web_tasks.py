"""What the worker of the dashboard's tests runs."""

import time

from umbel import App

app = App("shop", task_send_sent_event=True)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def pay(amount: int, password: str = "") -> None:
    raise ValueError(f"card refused, token={'s3cr3t' * 3} {amount}")


@app.task(keep_failed=False)
def loose(amount: int) -> None:
    raise ValueError("not kept")


@app.task(sensitive=("pin",))
def secret(pin: str) -> str:
    if pin.startswith("bad"):
        raise ValueError("the pin is wrong")
    return "paid"


@app.task
def wait(seconds: float) -> None:
    time.sleep(seconds)


@app.periodic(every=3600)
@app.task
def hourly() -> None:
    return None
