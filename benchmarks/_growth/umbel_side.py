"""Umbel's workflows, with results in the same Redis."""

from benchmarks._throughput import body
from umbel import App, chain, chord, group

WAIT_S = 100.0
app = App("bench", broker=body.URL, backend=body.URL)


@app.task
def step(_number: object = 0) -> int:
    body.noop(0)
    return 1


def run(kind: str, size: int) -> None:
    if kind == "chain":
        chain(step.si() for _ in range(size)).apply_async().get(timeout=WAIT_S)
    elif kind == "group":
        group(step.si() for _ in range(size)).apply_async().get(timeout=WAIT_S)
    else:
        chord([step.si() for _ in range(size)], step.s()).apply_async().get(timeout=WAIT_S)


def describe() -> dict[str, str]:
    return {}
