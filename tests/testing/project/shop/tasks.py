"""The shop's tasks. Its broker is a Redis that tests do not have."""

import threading
from typing import Any

from umbel import App

app = App("shop", broker="redis://127.0.0.1:1/0", task_routes={"shop.tasks.pack": "warehouse"})
MAILS: list[tuple[str, str]] = []
THREADS: set[str] = set()


@app.task
def add(a: int, b: int = 1) -> int:
    return a + b


@app.task
def pack(order: int) -> str:
    return f"packed {order}"


@app.task
def ship(parcel: str) -> str:
    THREADS.add(threading.current_thread().name)
    return f"shipped: {parcel}"


@app.task
def order(number: int) -> None:
    """Sends two more."""
    pack.delay(number)
    mail.delay("you", f"order {number}")


@app.task(ignore_result=True)
def mail(to: str, text: str) -> None:
    MAILS.append((to, text))


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


@app.task
def fail(why: str) -> None:
    raise LookupError(why)


@app.task(bind=True, max_retries=2)
def fetch(self: Any, url: str) -> str:
    """The third attempt works."""
    if self.request.retries < 2:
        raise self.retry(countdown=60)
    return f"fetched {url}"


@app.task(time_limit=60, soft_time_limit=50)
def limited() -> str:
    return "in time"


@app.task(unique_for=60)
def rebuild(index: str) -> str:
    return index


@app.task(sensitive=("card",))
def pay(card: str, amount: int) -> int:
    return amount


@app.periodic(cron="15 4 * * *")
@app.task
def nightly() -> str:
    MAILS.append(("all", "nightly"))
    return "done"
