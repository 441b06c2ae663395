"""Tasks with a parameter of every supported type, for apps of both libraries; the types that they name.

`pass_on` runs on a worker of one library, which sends what it was given on to `everything`, on a worker of
the other. Celery knows nothing of the types: it hands on what it read.
"""

import dataclasses
import datetime
import enum
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

try:
    import msgspec
    from pydantic import BaseModel
except ImportError:  # an older Celery, in an environment of its own: there these tasks do not run
    HAS_TYPES = False
else:
    HAS_TYPES = True


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 9


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    price: Decimal
    seen: datetime.datetime | None = None


if HAS_TYPES:

    class Box(msgspec.Struct, rename="camel", frozen=True):
        side_cm: int
        lines: list[Line] = []
        made_on: dict[str, datetime.date] = {}

    class Person(BaseModel):
        name: str
        born: datetime.date
        nicknames: set[str] = set()
        home: Path = Path(".")

    @dataclasses.dataclass
    class Everything:
        line: Line
        box: Box
        person: Person
        colour: Colour
        level: Level
        key: UUID
        path: Path
        at: datetime.datetime
        day: datetime.date
        took: datetime.timedelta
        price: Decimal
        raw: bytes
        pair: tuple[int, str]
        names: tuple[str, ...]
        tags: set[str]
        days: dict[datetime.date, int]
        size: Literal["s", "m", 3]
        maybe: UUID | None
        lines: list[Line] | None
        count: Annotated[int, msgspec.Meta(ge=0)]

    def everything(
        line: Line,
        box: Box,
        person: Person,
        colour: Colour,
        level: Level,
        key: UUID,
        path: Path,
        at: datetime.datetime,
        day: datetime.date,
        took: datetime.timedelta,
        price: Decimal,
        raw: bytes,
        pair: tuple[int, str],
        names: tuple[str, ...],
        tags: set[str],
        days: dict[datetime.date, int],
        size: Literal["s", "m", 3],
        maybe: UUID | None = None,
        lines: list[Line] | None = None,
        *,
        count: Annotated[int, msgspec.Meta(ge=0)],
    ) -> Everything:
        came = dict(locals())
        made = Everything(**came)
        kinds = {field.name: type(came[field.name]).__name__ for field in dataclasses.fields(made)}
        wrong = {name: kind for name, kind in kinds.items() if kind not in KINDS[name]}
        if wrong:
            raise AssertionError(f"arrived as something else: {wrong}")
        return made

    KINDS = {
        "line": {"Line"},
        "box": {"Box"},
        "person": {"Person"},
        "colour": {"Colour"},
        "level": {"Level"},
        "key": {"UUID"},
        "path": {"PosixPath"},
        "at": {"datetime"},
        "day": {"date"},
        "took": {"timedelta"},
        "price": {"Decimal"},
        "raw": {"bytes"},
        "pair": {"tuple"},
        "names": {"tuple"},
        "tags": {"set"},
        "days": {"dict"},
        "size": {"str", "int"},
        "maybe": {"UUID", "NoneType"},
        "lines": {"list", "NoneType"},
        "count": {"int"},
    }


def accept_msgpack(app: Any) -> None:
    """Have a Celery app read msgpack. msgspec writes and reads it where Celery's own choice is missing."""
    if not HAS_TYPES:
        return
    from kombu.serialization import register as register_serializer

    codec = msgspec.msgpack
    register_serializer("msgpack", codec.encode, codec.decode, "application/x-msgpack", "binary")
    app.conf.accept_content = ["json", "msgpack"]


def register(app: Any, serializer: str | None = None) -> Any:
    """The tasks `pass_on` and `everything` of this app, under the names that they have everywhere."""
    if not HAS_TYPES:
        return None
    options = {} if serializer is None else {"serializer": serializer}
    known = app.task(name="shared_tasks.everything", **options)(everything)

    def pass_on(values: Everything, queue: str, serializer: str) -> str:
        # On Celery's side they are a map of what was read.
        given = values if isinstance(values, dict) else vars(values)
        sent = app.send_task("shared_tasks.everything", kwargs=given, queue=queue, serializer=serializer)
        return str(sent.id)

    return known, app.task(name="shared_tasks.pass_on", **options)(pass_on)
