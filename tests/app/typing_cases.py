"""Calls of tasks, right and wrong: two type checkers and the run time must agree about each of them.

Each case is the body of an `async def`. Those in `PLAIN` are for the checkers alone: what JSON carries by
itself is not looked at when it is sent.
"""

PRELUDE = """
import datetime
import enum
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, assert_type
from uuid import UUID

import msgspec
from pydantic import BaseModel

from umbel import App, AsyncResult, GroupResult, Signature, Task, chain, chord, group

app = App("shop", broker="sqlite:////nowhere/shop.db", task_always_eager=True)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Order:
    number: int
    files: set[Path] = field(default_factory=set)

    def next(self) -> int:
        return self.number + 1


class Box(msgspec.Struct):
    side: int


class Person(BaseModel):
    name: str


class Audited(Task[..., Any]):
    max_retries = 5  # pyright: ignore  # there it is a property, which only mypy lets pass


@app.task
def add(a: int, b: int = 2) -> int:
    return a + b


@app.task
def place(order: Order, *, colour: Colour = Colour.RED) -> Order:
    return Order(order.number + 1, order.files)


@app.task(queue="slow", max_retries=5, autoretry_for=(OSError,), rate_limit="10/s")
def pack(box: Box, when: datetime.datetime) -> Box:
    return box


@app.task(base=Audited, throws=(KeyError,), expires=60.0)
def greet(person: Person) -> Person:
    return person


@app.task
def move(source: Path, target: Path | None = None) -> Path:
    return target or source


@app.task
def find(key: UUID) -> UUID:
    return key


@app.task
def price(amount: Decimal, day: datetime.date) -> Decimal:
    return amount


@app.task
def wait(first: datetime.timedelta, *others: datetime.timedelta) -> datetime.timedelta:
    return first


@app.task
def label(size: Literal["s", "m"], tags: set[str], pair: tuple[int, str]) -> tuple[int, str]:
    return pair


@app.task
def store(data: bytes, **named: Colour) -> bytes:
    return data


@app.task
def many(orders: list[Order]) -> list[Order]:
    return orders


@app.task
def total(orders: list[Order]) -> Decimal:
    return Decimal(sum(one.number for one in orders))


@app.task
def at_least(count: Annotated[int, msgspec.Meta(ge=1)]) -> int:
    return count


@app.task(bind=True, name="shop.bound")
def bound(self: Task[..., Any], order: Order) -> str:
    self.update_state("PROGRESS", {"number": order.number})
    return self.name


@app.task
async def later(order: Order) -> Order:
    return order


order, box, person = Order(1, {Path("a")}), Box(3), Person(name="Ada")
key, path, moment = UUID(int=5), Path("/x"), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
day, span = datetime.date(2026, 1, 2), datetime.timedelta(days=1)
"""

RIGHT = [
    "assert_type(add(1, 2), int)",
    "assert_type(add.delay(1, b=2), AsyncResult[int])",
    "assert_type(add.delay(1).get(timeout=1.0) + 1, int)",
    'assert_type(add.apply_async((1, 2), countdown=3.0, queue="fast", priority=1), AsyncResult[int])',
    "assert_type(add.apply((1, 2)).get(), int)",
    "assert_type(place.delay(order).get().next(), int)",
    "assert_type(place.delay(order, colour=Colour.BLUE), AsyncResult[Order])",
    "assert_type(place.delay(order=order).get().files.pop().name, str)",
    "assert_type(pack.delay(box, moment).get().side, int)",
    "assert_type(pack.delay(box, when=moment), AsyncResult[Box])",
    "assert_type(greet.delay(person).get().name.upper(), str)",
    "assert_type(move.delay(path).get().name, str)",
    "assert_type(move.delay(path, None).get(), Path)",
    "assert_type(find.delay(key).get().hex, str)",
    'assert_type(price.delay(Decimal("1.5"), day).get().is_nan(), bool)',
    "assert_type(wait.delay(span, span, span).get().days, int)",
    'assert_type(label.delay("s", {"a"}, (1, "b")).get(), tuple[int, str])',
    'assert_type(store.delay(b"x", a=Colour.RED, b=Colour.BLUE).get().decode(), str)',
    "assert_type(many.delay([order]).get()[0].next(), int)",
    "assert_type(at_least.delay(1).get(), int)",
    'assert_type(bound.delay(order).get(), str); assert bound.delay(order).get() == "shop.bound"',
    "assert_type(later.delay(order).get().next(), int)",
    "assert_type((await later(order)).next(), int)",
    "assert_type((await place.delay(order)).next(), int)",
    "assert_type(await place.adelay(order, colour=Colour.BLUE), AsyncResult[Order])",
    "assert_type((await (await place.adelay(order))).next(), int)",
    "assert_type((await (await later.adelay(order)).aget(timeout=1.0)).next(), int)",
    "assert_type(await (await add.adelay(1)).astate(), str)",
    'assert_type(await pack.aapply_async((box, moment), queue="fast"), AsyncResult[Box])',
    "assert_type(await place.s(order).adelay(), AsyncResult[Order])",
    "assert_type(await group(place.s(order), place.s(order)).adelay(), GroupResult)",
    "assert_type(await chord([place.s(order), place.s(order)], total.s()).adelay(), AsyncResult[Any])",
    "assert_type(await app.asend_many([place.s(order)]), list[AsyncResult[Any]])",
    'assert_type(add.s(1).set(queue="slow"), Signature[int])',
    "assert_type(place.s(order).delay().get().next(), int)",
    "assert_type(place.si(order), Signature[Order])",
    "assert_type((place.s(order) | place.s() | place.s(colour=Colour.BLUE)).delay().get().number, Any)",
    "assert_type(group(place.s(order), place.s(order)).delay(), GroupResult)",
    "assert_type(chord([place.s(order), place.s(order)])(total.s()).get(), Any)",
    "chain(place.s(order), bound.s()).apply_async(link=add.si(3), link_error=add.si(1, 2))",
    'assert_type(place.AsyncResult("id"), AsyncResult[Order])',
]

WRONG = [
    "add.delay()",
    "add.delay(1, 2, 3)",
    "add.delay(1, c=2)",
    "add.apply_async((1,), cuontdown=3)",
    "add.apply_async((1,), queue=3)",
    "app.task(max_retrys=3)(print)",
    'place.delay("order")',
    'place.delay({"number": "x"})',
    'place.delay(Order("x"))',
    "place.delay(order, Colour.BLUE)",
    'place.delay(order, colour="green")',
    "place.delay(None)",
    "pack.delay(box)",
    'pack.delay(box, "soon")',
    "pack.delay(order, moment)",
    "greet.delay(order)",
    'greet.delay({"name": 5})',
    "move.delay(5)",
    "find.delay(5)",
    "price.delay(Decimal(1), 5)",
    "wait.delay(span, 5)",
    'label.delay("x", {"a"}, (1, "b"))',
    'label.delay("s", {1}, (1, "b"))',
    'label.delay("s", {"a"}, (1,))',
    'store.delay("text")',
    'store.delay(b"x", a="green")',
    "many.delay(order)",
    "many.delay([1])",
    'at_least.delay("1")',
    "bound.delay()",
    "bound.delay(order, order)",
    "later.delay(5)",
    "place.delay(order).get().nothing",
    "find.delay(key).get().upper()",
    "move.delay(path).get().upper()",
    "(await later.delay(order)).nothing",
    "await place.adelay(5)",
    "await place.adelay()",
    "await find.adelay(key, key)",
    "await add.aapply_async((1,), cuontdown=3)",
    "(await (await place.adelay(order))).nothing",
    "(await (await find.adelay(key)).aget()).upper()",
    "(await place.adelay(order)).nothing",
    "place.s(order) | 5",
    'place.s(order).set(quue="slow")',
    "place.delay(order).get(tmeout=3)",
    "(await later(5)).next()",
]

PLAIN = [
    'add.delay("1")',
    'add("1")',
    "text: str = add.delay(1).get()",
]
