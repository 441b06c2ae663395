"""What a parameter's annotation says is what arrives, and what does not fit is not sent."""

import datetime
import enum
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID

import annotated_types
import msgspec
import pydantic
import pytest

from tests.app import late_types
from umbel import App, Task, chain, chord, group
from umbel.app.task import Parameters
from umbel.app.types import CallTypes
from umbel.errors import ChordError, ConfigurationError, WrongType
from umbel.launch.project import task_rules
from umbel.testing.inbox import SentCall
from umbel.wire.call import decode_task


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    name: str
    price: Decimal


@dataclass
class Order:
    number: int
    at: datetime.datetime
    lines: list[Line] = field(default_factory=list)
    files: set[Path] = field(default_factory=set)
    days: dict[datetime.date, UUID] = field(default_factory=dict)


class Box(msgspec.Struct, array_like=True):
    side: Annotated[int, msgspec.Meta(gt=0)]
    colour: Colour = Colour.RED


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: float


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    name: str = pydantic.Field(alias="fullName")
    born: datetime.date
    tags: set[str] = set()

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def shout(self) -> str:
        return self.name.upper()


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: frozenset[str] = frozenset()


class Holder(msgspec.Struct):
    person: Person
    places: tuple[PurePosixPath, ...] = ()


class Pair(NamedTuple):
    left: int
    right: str


class Row(TypedDict):
    at: datetime.datetime


Id = NewType("Id", UUID)
ORDER = Order(
    7,
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    [Line("tea", Decimal("1.50"))],
    {Path("/a")},
    {datetime.date(2026, 1, 2): UUID(int=3)},
)
PERSON = Person(fullName="Ada", born=datetime.date(1815, 12, 10), tags={"x"})

ARRIVE: list[tuple[Any, Any]] = [
    (Order, ORDER),
    (list[Order], [ORDER, ORDER]),
    (dict[str, Line], {"a": Line("x", Decimal(1))}),
    (Box, Box(3, Colour.BLUE)),
    (Circle | Square, Square(2.0)),
    (Person, PERSON),
    (list[Person] | None, [PERSON]),
    (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], Dog(tricks=frozenset({"roll"}))),
    (Cat | Dog, Cat(lives=3)),
    (Holder, Holder(PERSON, (PurePosixPath("a"),))),
    (Colour, Colour.RED),
    (UUID, UUID(int=5)),
    (Id, UUID(int=5)),
    (Path, Path("/tmp/x")),
    (datetime.datetime, ORDER.at),
    (datetime.date, datetime.date(2026, 1, 2)),
    (datetime.time, datetime.time(3, 4)),
    (datetime.timedelta, datetime.timedelta(days=-1, microseconds=5)),
    (Decimal, Decimal("1.50")),
    (bytes, b"\xff\x00"),
    (bytes, b"text"),
    (tuple[int, str], (1, "a")),
    (tuple[Colour, ...], (Colour.RED, Colour.BLUE)),
    (tuple, (1, 2)),
    (set[int], {1, 2}),
    (frozenset[Colour], frozenset({Colour.RED})),
    (dict[int, str], {1: "a"}),
    (dict[Colour, datetime.date], {Colour.RED: datetime.date(2026, 1, 2)}),
    (Literal["a", 2], 2),
    (Colour | None, None),
    (Path | None, Path("x")),
    (int | Colour, 5),
    (Pair, Pair(1, "x")),
    (Row, {"at": ORDER.at}),
    (Annotated[int, msgspec.Meta(ge=0)], 0),
    (Annotated[str, pydantic.Field(min_length=2, pattern="^a")], "ab"),
    (Annotated[list[int], annotated_types.Len(1, 2)], [1]),
    (Annotated[int, pydantic.AfterValidator(abs)], 3),
]

# JSON's tags tell these apart; msgpack has none, and says nothing of types that are not stated.
CARRIED: list[tuple[Any, Any]] = [
    (datetime.datetime | datetime.date, datetime.date(2026, 1, 2)),
    (bytes | str, b"\xff"),
    (int | str | UUID, UUID(int=3)),
]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    made = App("typed", broker="sqlite:////nowhere/typed.db", accept_content=["json", "msgpack", "pickle"])
    yield made
    made.close()


def echo(app: App, kind: Any, **options: Any) -> Any:
    def echoes(value: Any) -> Any:
        seen.append(value)
        return value

    seen: list[Any] = []
    echoes.__annotations__ = {"value": kind, "return": kind}
    made = app.task(name=f"echo{len(app.tasks)}", **options)(echoes)
    made.seen = seen
    return made


@pytest.mark.parametrize("serializer", ["json", "msgpack", "pickle"])
@pytest.mark.parametrize(("kind", "value"), ARRIVE)
def test_it_arrives_as_what_it_was_and_so_does_the_result(
    app: App, kind: Any, value: Any, serializer: Any
) -> None:
    task = echo(app, kind, serializer=serializer)
    with app.eager():
        for result in (task.delay(value), task.delay(value=value), task.s(value).delay()):
            assert (result.get(), result.result, type(result.get())) == (value, value, type(value))
    assert task.seen == [value] * 3
    assert {type(one) for one in task.seen} == {type(value)}


@pytest.mark.parametrize(("kind", "value"), CARRIED)
def test_json_brings_back_by_itself_what_msgspec_cannot_tell_apart(app: App, kind: Any, value: Any) -> None:
    task = echo(app, kind)
    with app.eager():
        assert task.delay(value).get() == value


def test_pickle_carries_the_objects_themselves(app: App) -> None:
    task = echo(app, Order, serializer="pickle")
    message = app.prepare(task.name, [ORDER], {}, {}).outgoing.message
    assert decode_task(message, accept=["pickle"]).args == [ORDER]


REFUSED: list[tuple[Any, Any, str]] = [
    (Order, {"number": "x"}, "missing required field|Expected `int`"),
    (Order, Order("7", ORDER.at), "Expected `int`, got `str` - at .number"),  # type: ignore[arg-type]
    (Order, None, "Expected `object`, got `null`"),
    (list[Order], [ORDER, 3], r"Expected `object`, got `int` - at \[1\]"),
    (Box, Box(0), "Expected `int` >= 1"),
    (Person, {"fullName": 3, "born": "2026-01-02"}, r"valid string - at \['fullName'\]"),
    (Cat | Dog, {"kind": "cow"}, "Input should be 'cat'"),
    (Colour, "green", "Invalid enum value 'green'"),
    (UUID, "x", "Invalid UUID"),
    (Path, 5, "expected str"),
    (datetime.datetime, "soon", "Invalid RFC3339 encoded datetime"),
    (datetime.date, 5, "Expected `date`, got `int`"),
    (datetime.timedelta, 5, "Expected `duration`, got `int`"),
    (Decimal, "a", "Invalid decimal string"),
    (bytes, "text", "Expected `bytes`, got `str`"),
    (tuple[int, str], (1,), "length 2"),
    (set[int], {"a"}, "Expected `int`, got `str`"),
    (Literal["a", "b"], "c", "Invalid enum value 'c'"),
    (Annotated[int, msgspec.Meta(ge=0)], -1, "Expected `int` >= 0"),
    (Annotated[str, pydantic.Field(min_length=2)], "a", "length >= 2"),
    (Annotated[int, annotated_types.Interval(ge=1, le=3)], 4, "<= 3"),
    (Line, Line("x", object()), "cannot send a <class 'object'>"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("kind", "value", "problem"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    app: App, kind: Any, value: Any, problem: str
) -> None:
    task = echo(app, kind)
    sends: list[Callable[..., Any]] = [
        task.delay,
        task.s().delay,
        lambda one: app.send_task(task.name, [one]),
    ]
    for send in sends:  # the broker's address leads nowhere: what is sent would raise another error
        with pytest.raises(TypeError, match=f"argument 'value' of {task.name} is .*{problem}"):
            send(value)


def raw(app: App, name: str, *args: Any, **kwargs: Any) -> Any:
    """Sent by somebody who knows nothing of the task's types."""
    stranger = App("stranger", task_always_eager=False)
    message = stranger.prepare(name, args, kwargs, {})
    with app.eager():
        app.publish([message])
        return app.AsyncResult(message.task_id)


def test_what_a_stranger_sends_is_parsed_or_fails_by_name(app: App) -> None:
    task = echo(app, Order, autoretry_for=(Exception,), max_retries=5)
    sent = {"number": 7, "at": "2026-01-02T00:00:00Z", "lines": [{"name": "tea", "price": 2}], "more": 1}
    assert raw(app, task.name, sent).state == "SUCCESS"
    assert task.seen == [Order(7, ORDER.at, [Line("tea", Decimal(2))])]
    failed = raw(app, task.name, {**sent, "number": []})
    assert failed.state == "FAILURE"  # and was not retried
    with pytest.raises(TypeError, match=f"argument 'value' of {task.name} .* - at .number"):
        failed.get()


def test_a_result_that_does_not_fit_is_a_failure(app: App) -> None:
    @app.task
    def lies() -> Colour:
        return "green"  # type: ignore[return-value]

    with app.eager():
        result = lies.delay()
        assert result.state == "FAILURE"
        with pytest.raises(TypeError, match=r"the result of \S*lies is 'green'.*Invalid enum"):
            result.get()


def test_a_result_is_of_the_type_that_this_client_states(app: App) -> None:
    @app.task
    def gives() -> UUID:
        return UUID(int=5)

    with app.eager():
        result = gives.delay()
        assert gives.AsyncResult(result.id).get() == UUID(int=5)
        assert app.AsyncResult(result.id).get() == UUID(int=5)  # JSON's tag
        line = echo(app, Line)
        task_id = line.delay(Line("x", Decimal(1))).id
        assert line.AsyncResult(task_id).get() == Line("x", Decimal(1))
        assert app.AsyncResult(task_id).get() == {"name": "x", "price": Decimal(1)}  # its type is not known


def test_the_result_of_a_recorded_call_is_of_its_tasks_type(app: App) -> None:
    task, line = echo(app, Line), Line("x", Decimal(1))
    sent = app.prepare(task.name, [line], {}, {})
    with app.eager():
        app.publish([sent])
        assert SentCall(app, sent.outgoing, 1).result.get() == line


def test_every_kind_of_parameter(app: App) -> None:
    @app.task(bind=True)
    def all_kinds(
        self: Task[..., Any],
        first: Colour,
        /,
        second: Path,
        plain: int = 3,
        late: Colour = None,  # type: ignore[assignment]
        *rest: Colour,
        named: UUID,
        **others: Line,
    ) -> list[Any]:
        return [self.name, first, second, plain, late, rest, named, others, self.request.args]

    red, path, key, line = Colour.RED, Path("x"), UUID(int=1), Line("x", Decimal(1))
    with app.eager():
        everything: list[Any] = [red, path, 4, None, red, Colour.BLUE]
        all_kinds.delay(*everything, named=key, first=line, other=line).get()
        assert all_kinds.delay(red, second=path, named=key).get()[1:8] == ["red", "x", 3, None, [], key, {}]
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("green", path), {"named": key}, "first"),
        ((red, path, 1, None, red, 5), {"named": key}, "rest"),
        ((red, path), {"named": 5}, "named"),
        ((red, path), {"named": key, "other": 5}, "others"),
    ]
    for args, kwargs, name in wrong:
        with pytest.raises(WrongType, match=f"argument '{name}' of"):
            all_kinds.apply_async(args, kwargs)


def test_plain_parameters_are_left_alone(app: App) -> None:
    class Own:
        pass

    @app.task
    def plain(
        a: int, b: list[str] | None, c: dict[str, Any], d: Own, e: Callable[..., Any], *args: str
    ) -> float:
        return 0.5

    assert plain.options.types is None
    with app.eager():
        assert plain.delay("not a number", 1, 2, {"x": 1}, 5, 6).successful()  # type: ignore[arg-type]


def test_typing_false_checks_and_converts_nothing(app: App) -> None:
    task = echo(app, Colour, typing=False)
    assert task.options.types is None
    with app.eager():
        assert task.delay(Colour.RED).get() == "red"
        assert task.delay("green").get() == "green"


def test_canvas_passes_typed_results_on(app: App) -> None:
    @app.task
    def make(number: int) -> Order:
        return Order(number, ORDER.at, files={Path("/x")})

    @app.task
    def add_line(order: Order, line: Line, path: Path = Path(".")) -> Order:
        return Order(order.number, order.at, [*order.lines, line], order.files | {path})

    @app.task
    def count(orders: list[Order], more: Colour) -> tuple[int, Colour]:
        assert all(type(one) is Order for one in orders)
        return sum(one.number for one in orders), more

    line = Line("tea", Decimal("1.5"))
    with app.eager():
        chained = chain(make.s(1), add_line.s(line), add_line.s(line, path=Path("p"))).delay()
        assert chained.get() == Order(1, ORDER.at, [line, line], {Path("/x"), Path("p"), Path(".")})
        assert chained.parent.get() == Order(1, ORDER.at, [line], {Path("/x"), Path(".")})
        assert group(make.s(1), make.s(2)).delay().get() == [
            Order(n, ORDER.at, files={Path("/x")}) for n in (1, 2)
        ]
        assert chord([make.s(1), make.s(2)])(count.s(Colour.BLUE)).get() == (3, Colour.BLUE)
        assert make.s(3).set(link=add_line.s(line)).delay().get().number == 3
        with pytest.raises(TypeError, match="argument 'order' of"):
            chain(count.s([], Colour.RED), add_line.s(line)).delay().get()
        with pytest.raises(ChordError, match="argument 'orders' of"):
            chord([count.s([], Colour.RED), count.s([], Colour.RED)])(count.s(Colour.RED)).get()
        mapped = add_line.starmap([(ORDER, line), (ORDER, line, Path("q"))]).delay()
        assert [len(one.lines) for one in mapped.get()] == [2, 2]
        chunked = add_line.chunks([(ORDER, line), (ORDER, line)], 1).delay()
        assert [[len(one.lines) for one in part] for part in chunked.get()] == [[2], [2]]


def test_retries_async_tasks_and_errbacks(app: App) -> None:
    told: list[Any] = []

    @app.task(bind=True, max_retries=2, default_retry_delay=0)
    def again(self: Task[..., Any], line: Line, path: Path) -> Line:
        if not self.request.retries:
            self.retry(countdown=0)
        if self.request.retries == 1:
            self.retry(args=(Line("other", line.price), path), countdown=0)
        return line

    @app.task
    async def later(line: Line) -> Line:
        return line

    @app.task
    def on_error(request: Any, error: Exception, traceback: str, line: Line) -> None:
        told.append(line)

    @app.task
    def breaks() -> Colour:
        raise LookupError("no")

    line = Line("x", Decimal(1))
    with app.eager():
        assert again.delay(line, Path("a")).get() == Line("other", Decimal(1))
        assert later.delay(line).get() == line
        assert isinstance(breaks.apply_async(link_error=on_error.s()).get(propagate=False), LookupError)
        breaks.apply_async(link_error=on_error.s().set(immutable=False).clone(kwargs={"line": line}))
    assert told == [line]


def test_sensitive_values_stay_out_of_the_error(app: App) -> None:
    @app.task(sensitive=("card",))
    def pay(card: Annotated[str, msgspec.Meta(min_length=16)]) -> None: ...

    with pytest.raises(WrongType) as caught:
        pay.delay("4111")
    assert "4111" not in str(caught.value)


def test_an_error_about_a_key_names_the_argument_and_shows_no_sensitive_one(app: App) -> None:
    task = echo(app, dict[Colour, int])
    with pytest.raises(WrongType, match=rf"argument 'value' of {task.name} is .*Invalid enum value 'green'"):
        task.delay({"green": 1})

    @app.task(sensitive=("card",))
    def charge(card: dict[Colour, int], amount: Decimal) -> None: ...

    for key in ("4111", "4111 - at `$.amount`"):
        with pytest.raises(WrongType, match="argument 'card' of") as caught:
            charge.delay({key: 1}, Decimal(1))  # type: ignore[dict-item]
        assert "4111" not in str(caught.value)


def test_a_complaint_that_names_no_argument_shows_none(app: App) -> None:
    open_types, hidden = (CallTypes(Parameters("t", lambda: None), names) for names in ((), ("card",)))
    assert str(open_types._refused("", None, "'4111' is wrong")).endswith(
        "an argument of t does not fit its type: '4111' is wrong"
    )
    assert "4111" not in str(hidden._refused("", None, "'4111' is wrong"))


@pytest.mark.parametrize("kind", [Line | Order, Path | int, list[Path | int], list[Path] | Path])
def test_types_that_cannot_be_told_apart_are_refused_where_the_task_is_defined(app: App, kind: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"parameter 'value' of task 'echo\d+' is not supported.*(more than one|custom type)",
    ):
        echo(app, kind)
    assert echo(app, kind, typing=False).options.types is None


def test_a_path_beside_text_arrives_as_text(app: App) -> None:
    task = echo(app, Path | str | None)
    with app.eager():
        assert task.delay(Path("/x")).get() == "/x"


def test_annotations_that_are_text_are_looked_up_when_they_can_be(app: App) -> None:
    early = app.task(late_types.takes_early)
    late, unknown = app.task(late_types.takes_late), app.task(late_types.takes_unknown)
    bound = app.task(bind=True)(late_types.bound)
    assert app.task(late_types.takes_plain).options.types is None
    with pytest.raises(
        ConfigurationError, match=r"takes_late' cannot be resolved: name 'Late' is not defined"
    ):
        late.delay({"number": 1})  # type: ignore[arg-type]
    late_types.define_late()
    with app.eager():
        assert early.delay(late_types.Early(1)).get() == late_types.Early(1)
        assert late.delay(late_types.Late(1)).get() == late_types.Late(1)
        assert bound.delay(late_types.Late(1)).get() == late_types.Late(1)
    with pytest.raises(ConfigurationError, match="name 'Decimal' is not defined"):
        unknown.delay(Decimal(1))


@pytest.mark.parametrize("text", ["the number", "int | 'Foo'", "1 +"])
def test_an_annotation_that_is_no_type_is_refused_by_name(app: App, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"of parameter 'value' of task 'echo\d+' is no type: "):
        echo(app, text)
    assert echo(app, text, typing=False).options.types is None


def test_a_name_that_its_module_does_not_have_yet_is_looked_up_later(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = echo(app, "late_types.Nope")
    with pytest.raises(ConfigurationError, match=r"cannot be resolved: .* has no attribute 'Nope'"):
        task.delay(1)
    monkeypatch.setattr(late_types, "Nope", Colour, raising=False)
    with app.eager():
        assert task.delay(Colour.RED).get() is Colour.RED


def test_pydantic_is_not_imported_for_others() -> None:
    from subprocess import run

    code = "import sys; from umbel import App; App('x'); assert 'pydantic' not in sys.modules"
    run([sys.executable, "-c", code], check=True)


def test_a_worker_does_not_start_with_names_that_nobody_knows(app: App) -> None:
    made = App("late", broker="sqlite:////nowhere/late.db")
    made.task(late_types.takes_unknown)
    with pytest.raises(ConfigurationError, match="takes_unknown' cannot be resolved: name 'Decimal'"):
        task_rules(made, made.settings)


def test_a_type_error_of_the_task_itself_stays_what_it_is(app: App) -> None:
    @app.task
    def adds(amount: Decimal) -> Decimal:
        return amount + "1"  # type: ignore[operator]

    with app.eager():
        raised: Any = adds.delay(Decimal(1)).get(propagate=False)
        assert type(raised) is TypeError
