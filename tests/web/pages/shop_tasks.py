"""The app that the dashboard's pages are tested and photographed with: a small shop."""

import os
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App, ElectionContext, Reject, Task, chain, chord

app = App("shop")

HOSTILE_NAME = "shop.<script>document.title='taken'</script>"


def _wait_for(gate: str) -> None:
    while not Path(gate).exists():
        Event().wait(0.02)


@app.task(name="shop.add")
def add(x: int, y: int, *, gate: str = "") -> int:
    if gate:
        _wait_for(gate)
    return x + y


@app.task(name="shop.total")
def total(parts: list[int]) -> int:
    return sum(parts)


@app.task(name="shop.order")
def order(*, gate: str) -> str:
    """A chord of chains: the middle part ends when the file is there."""
    quick = chain(add.s(1, 2), add.s(3))
    slow = chain(add.s(4, 5), add.s(6, gate=gate))
    return str(chord([quick, slow, add.s(7, 8)], total.s()).delay().id)


@app.task(name="shop.pay", max_retries=0)
def pay(order: str) -> None:
    raise ValueError(f"no customer for {order}")


@app.task(name="shop.refuse", max_retries=0)
def refuse(order: str) -> None:
    raise Reject(f"{order} is no order")


@app.task(bind=True, name="shop.again", max_retries=2)
def again(self: Task[..., Any], order: str) -> str:
    if self.request.retries == 0:
        raise self.retry(exc=ConnectionError(f"{order}: gateway away"), countdown=0.1)
    return order


@app.task(bind=True, name="shop.pack")
def pack(self: Task[..., Any], gate: str) -> str:
    """Runs until the file is there."""
    self.progress(3, 8)
    _wait_for(gate)
    return f"packed by {os.getpid()}"


@app.task(name=HOSTILE_NAME)
def hostile(text: str) -> str:
    return text


@app.periodic(every=3600, name="nightly totals")
@app.task(name="shop.nightly")
def nightly() -> str:
    return "counted"


@app.task(name="shop.weekly")
def weekly() -> str:
    return "counted"


@app.election_handler("stocktaking")
def stocktaking(action: Any, context: ElectionContext) -> str:
    return f"counted in term {context.term}"
