"""What the type checker of a user says about tasks used rightly and wrongly."""

import re
from pathlib import Path

from mypy import api

ROOT = Path(__file__).resolve().parents[2]

RIGHT = """
from typing import Any, assert_type

from umbel import App, AsyncResult, GroupResult, Signature, Task, chain, chord, group

app = App("shop")


@app.task
def add(a: int, b: int = 2) -> int:
    return a + b


@app.task(queue="slow", max_retries=5, autoretry_for=(OSError,), rate_limit="10/s")
def total(amounts: list[int], *, tax: float = 0.0) -> float:
    return sum(amounts) * (1 + tax)


@app.task(bind=True, name="shop.fetch")
def fetch(self: Task[..., Any], url: str) -> bytes:
    self.update_state("PROGRESS", {"url": url})
    if self.request.retries > 3:
        self.retry(countdown=5.0)
    return url.encode()


@app.task
async def later(name: str) -> str:
    return name


@app.task(bind=True)
async def bound_later(self: Task[..., Any], name: str) -> str:
    return await later(name)


assert_type(add(1, 2), int)
assert_type(add.delay(1, b=2), AsyncResult[int])
assert_type(add.delay(1).get(timeout=1.0), int)
assert_type(add.apply_async((1, 2), countdown=3.0, queue="fast", priority=1), AsyncResult[int])
assert_type(add.apply((1, 2)), AsyncResult[int])
assert_type(add.s(1).set(queue="slow"), Signature[int])
assert_type(add.si(1, 2).delay(), AsyncResult[int])
assert_type(total.delay([1, 2], tax=0.2).get(), float)
assert_type(fetch.delay("http://example"), AsyncResult[bytes])
assert_type(fetch("http://example"), bytes)
assert_type(add.app.AsyncResult("id"), AsyncResult[Any])
assert_type(add.s(1).app.send_task("shop.add", (1, 2), queue="slow"), AsyncResult[Any])
assert_type(add.delay(1).app.settings.task_default_queue, str)
add.delay(1).app.control.inspect().active()
(add.s(1) | add.s(2) | add.s(3)).delay()
assert_type(group(add.s(1), add.s(2)).delay(), GroupResult)
assert_type(group(add.s(1), add.s(2))(), GroupResult)
assert_type(chord([add.s(1)])(total.s()), AsyncResult[Any])
assert_type(add.signature((1,), queue="slow"), Signature[int])
assert_type(add.AsyncResult("id"), AsyncResult[int])
assert_type(add.max_retries, int | None)


class Audited(Task[..., Any]):
    max_retries = 5

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None: ...


@app.task(base=Audited, throws=(KeyError,), expires=60.0)
def audited(a: int) -> str:
    return str(a)


assert_type(audited.delay(1), AsyncResult[str])
chain(add.s(1), add.s(2)).apply_async(link=add.s(3), link_error=add.si(1, 2))


async def use() -> None:
    assert_type(await later("x"), str)
    assert_type(await later.delay("x"), str)
    assert_type(await bound_later.delay("x"), str)
    assert_type(await add.delay(1), int)
    assert_type(await add.adelay(1, b=2), AsyncResult[int])
    assert_type(await (await add.adelay(1)), int)
    assert_type(await (await add.adelay(1)).aget(timeout=1.0), int)
    assert_type(await (await add.adelay(1)).astate(), str)
    assert_type(await add.aapply_async((1, 2), countdown=3.0, queue="fast"), AsyncResult[int])
    assert_type(await fetch.adelay("http://example"), AsyncResult[bytes])
    assert_type(await later.adelay("x"), AsyncResult[str])
    assert_type(await bound_later.adelay("x"), AsyncResult[str])
    assert_type(await add.s(1).adelay(2), AsyncResult[int])
    assert_type(await group(add.s(1), add.s(2)).adelay(), GroupResult)
    assert_type(await (await group(add.s(1)).adelay()).aget(timeout=1.0), list[Any])
    assert_type(await chord([add.s(1)], total.s()).adelay(), AsyncResult[Any])
    assert_type(await app.asend_many([add.s(1)]), list[AsyncResult[Any]])
    assert_type(await app.asend_task("shop.add", (1, 2)), AsyncResult[Any])
    async for event in await add.adelay(1):
        assert_type(event, dict[str, Any])
    async with app as opened:
        assert_type(opened, App)
"""

WRONG = """
from typing import Any

from umbel import App, Task

app = App("shop")


@app.task
def add(a: int, b: int = 2) -> int:
    return a + b


@app.task(bind=True)
def fetch(self: Task[..., Any], url: str) -> bytes:
    return url.encode()


@app.task
async def later(name: str) -> str:
    return name


add.delay("1")  # arg-type
add.delay()  # call-arg
add.delay(1, 2, 3)  # call-arg
add.delay(1, c=2)  # call-arg
add("1")  # arg-type
fetch.delay(1)  # arg-type
fetch.delay("x", "y")  # call-arg
later.delay(1)  # arg-type
number: int = later("x")  # assignment
text: str = add.delay(1).get()  # assignment
add.apply_async((1,), cuontdown=3)  # call-arg
add.apply_async((1,), queue=3)  # arg-type
app.task(max_retrys=3)  # call-overload


async def use() -> None:
    await add.adelay("1")  # arg-type
    await add.adelay()  # call-arg
    await add.adelay(1, 2, 3)  # call-arg
    await fetch.adelay(1)  # arg-type
    await later.adelay(1)  # arg-type
    await add.aapply_async((1,), cuontdown=3)  # call-arg
    await add.aapply_async((1,), queue=3)  # arg-type
    text: str = await (await add.adelay(1))  # assignment
    wrong: str = await (await add.adelay(1)).aget()  # assignment
    sent: int = add.adelay(1)  # assignment
"""


def test_the_type_checker_knows_what_a_task_takes_and_gives(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text(WRONG)
    config, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
    options = ["--config-file", str(config), "--cache-dir", str(cache), "--no-error-summary", "--no-pretty"]
    out, err, _ = api.run([*options, str(right), str(wrong)])
    found = {
        (Path(path).name, int(line), code)
        for path, line, code in re.findall(r"^(\S+?):(\d+): error: .*\[([\w-]+)\]$", out, re.MULTILINE)
    }
    expected = {
        ("wrong.py", number, line.rpartition("# ")[2])
        for number, line in enumerate(WRONG.splitlines(), start=1)
        if "  # " in line
    }
    assert (found, err) == (expected, ""), out
