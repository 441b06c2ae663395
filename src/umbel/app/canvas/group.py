"""Group and chord: calls side by side, their results together, and one more call that is given those.

A group is sent as its members' messages, each marked with the group's id and its place in it. A
group inside a group is flattened: what counts is the tasks. What follows a group in a chain makes a
chord of both: its parts carry the body, which is sent when the last of them has ended
(`running/chord_parts.py`).
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack, cast

from umbel.app.canvas.signature import Signature, register_kind, signature_from
from umbel.app.results import AsyncResult, join, join_async
from umbel.app.running.request import Request
from umbel.app.sending.ids import new_id
from umbel.app.sending.options import SendOptions
from umbel.app.sending.prepare import Prepared
from umbel.wire.task import SignatureMap

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

GROUP_TASK, CHORD_TASK = "celery.group", "celery.chord"


class GroupResult:
    """The results of tasks that were sent together, in their order.

    A member that ends in a group has the results of that group in its place.
    """

    def __init__(
        self,
        group_id: str,
        results: "Sequence[AsyncResult[Any] | GroupResult]",
        *,
        app: "SendingApp",
        parent: Any = None,
    ) -> None:
        self.id = group_id
        self.results = list(results)
        self.app = app
        self.parent = parent

    def get(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> list[Any]:
        """Wait for all; the first member that failed raises its exception here, as soon as it fails."""
        return self._nested(join(self._flat(), timeout, propagate=propagate, allow_join=allow_join))

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.get_async().__await__()

    async def get_async(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> list[Any]:
        """The same as `get` for async code: the event loop is not blocked."""
        values = await join_async(self._flat(), timeout, propagate=propagate, allow_join=allow_join)
        return self._nested(values)

    def ready(self) -> bool:
        return all(result.ready() for result in self.results)

    def successful(self) -> bool:
        return all(result.successful() for result in self.results)

    def failed(self) -> bool:
        return any(result.failed() for result in self.results)

    def completed_count(self) -> int:
        return sum(result.successful() for result in self.results)

    def revoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent its tasks from starting; `terminate` also ends those that run."""
        if self.results:
            app = self.results[0].app
            app.control.revoke([result.id for result in self._flat()], terminate=terminate, signal=signal)

    def forget(self) -> None:
        for result in self.results:
            result.forget()

    def __iter__(self) -> "Iterator[AsyncResult[Any] | GroupResult]":
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, place: int) -> "AsyncResult[Any] | GroupResult":
        return self.results[place]

    def __repr__(self) -> str:
        return f"<GroupResult {self.id} of {len(self.results)}>"

    def _flat(self) -> list[AsyncResult[Any]]:
        return [
            task for one in self.results for task in (one._flat() if isinstance(one, GroupResult) else (one,))
        ]

    def _nested(self, values: Iterable[Any]) -> list[Any]:
        """The values of all tasks, each in the place of its result."""
        left = iter(values)
        return [
            one._nested(islice(left, len(one._flat()))) if isinstance(one, GroupResult) else next(left)
            for one in self.results
        ]


class Group(Signature[list[Any]]):
    """Calls side by side. Arguments and options given when it is sent go to each member."""

    subtask_type = "group"

    def __init__(
        self,
        *members: Signature[Any] | Iterable[Signature[Any]],
        app: "SendingApp | None" = None,
        options: SendOptions | None = None,
    ) -> None:
        self.members = _flattened(members)
        super().__init__(GROUP_TASK, options=options, app=app or _app_of(self.members))

    def clone(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> "Group":
        members = [member.clone(args, kwargs) for member in self.members]
        return Group(members, app=self._app, options=cast(SendOptions, {**self.options, **options}))

    def freeze(self, task_id: str | None = None) -> str:
        group_id: str = self.options.setdefault("task_id", task_id or new_id())
        for member in self.members:
            member.freeze()
        return group_id

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """The messages of all members, each marked with the group and its place."""
        group_id = self.freeze()
        shared = {name: value for name, value in self.options.items() if name not in _OF_THE_GROUP}
        prepared: list[Prepared] = []
        if not self._is_part:
            self._number(group_id, 0)
        for member in self.members:
            if shared:
                member.options = cast(SendOptions, {**shared, **member.options})
            prepared += member.prepare(sender=sender)
        return prepared

    def join_group(self, group_id: str, place: int | None) -> None:
        super().join_group(group_id, place)
        if self._is_part and place is not None:
            self._number(group_id, place)

    def join_chord(self, body: SignatureMap) -> None:
        """Each of its tasks is a part: the chord is given all their results."""
        super().join_chord(body)
        for member in self.members:
            member.join_chord(body)

    def parts(self) -> int:
        return sum(member.parts() for member in self.members) if self._is_part else 1

    @property
    def _is_part(self) -> bool:
        return "chord" in self.options

    def _number(self, group_id: str, place: int) -> None:
        for member in self.members:
            member.join_group(group_id, place)
            place += member.parts()

    def handle(self, parent: Any = None) -> Any:
        results = [member.handle() for member in self.members]
        return GroupResult(self.options["task_id"], results, app=self.app, parent=parent)

    def absorb(self, following: Signature[Any]) -> Signature[Any]:
        """What follows a group waits for all of it: that is a chord."""
        return Chord(self.members, following, app=self._app)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [member(*args, **kwargs) for member in self.members]

    def __len__(self) -> int:
        return len(self.members)

    def to_map(self) -> SignatureMap:
        whole = super().to_map()
        whole["kwargs"] = {"tasks": [member.to_map() for member in self.members]}
        return whole

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.members))})"


_OF_THE_GROUP = frozenset({"task_id", "chain", "chord", "link", "link_error", "group_id", "group_index"})


class Chord(Signature[Any]):
    subtask_type = "chord"

    def __init__(
        self,
        header: Iterable[Signature[Any]],
        body: Signature[Any],
        *,
        app: "SendingApp | None" = None,
        options: SendOptions | None = None,
    ) -> None:
        self.header = Group(header, app=app or body._app)
        self.body = body
        super().__init__(CHORD_TASK, options=options, app=app or self.header._app or body._app)

    def clone(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> "Chord":
        header = self.header.clone(args, kwargs)
        whole = cast(SendOptions, {**self.options, **options})
        return Chord([header], self.body.clone(), app=self._app, options=whole)

    def freeze(self, task_id: str | None = None) -> str:
        self.header.freeze()
        return self.body.freeze(task_id or self.options.get("task_id"))

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """The messages of the header, each carrying the body; of the body alone if there is none."""
        self.freeze()
        self._hand_options_to_body()
        if not self.header.members:
            return self.body.clone([[]]).prepare(sender=sender)
        group_id = self.header.freeze()
        if "group_id" not in self.body.options:  # a body that is itself a part stays one of the outer chord
            self.body.join_group(group_id, None)
        body = self.body.to_map()
        for member in self.header.members:
            member.join_chord(body)
        self.app.backend.start_chord(group_id, sum(member.parts() for member in self.header.members))
        return self.header.prepare(sender=sender)

    def handle(self, parent: Any = None) -> Any:
        return self.body.handle(self.header.handle(parent))

    def absorb(self, following: Signature[Any]) -> Signature[Any]:
        return Chord([self.header], self.body | following, app=self._app, options=self.options)

    def join_group(self, group_id: str, place: int | None) -> None:
        self.body.join_group(group_id, place)

    def join_chord(self, body: SignatureMap) -> None:
        self.body.join_chord(body)

    def parts(self) -> int:
        return self.body.parts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self.header(*args, **kwargs))

    def to_map(self) -> SignatureMap:
        whole = super().to_map()
        header = [member.to_map() for member in self.header.members]
        whole["kwargs"] = {"header": header, "body": self.body.to_map(), "kwargs": {}}
        return whole

    def __repr__(self) -> str:
        return f"chord({self.header!r}, {self.body!r})"

    def _hand_options_to_body(self) -> None:
        """What was said of the whole is meant for its end; the header gets the sending options."""
        of_the_end = {name: value for name, value in self.options.items() if name in _OF_THE_END and value}
        self.body.options = cast(SendOptions, {**self.body.options, **of_the_end})
        of_each = {name: value for name, value in self.options.items() if name in _OF_EACH}
        self.header.options = cast(SendOptions, {**of_each, **self.header.options})


_OF_THE_END = frozenset({"link", "link_error", "chain", "chord"})
_OF_EACH = frozenset({"queue", "priority", "countdown", "eta", "expires"})


def group(*members: Signature[Any] | Iterable[Signature[Any]]) -> Group:
    """Calls side by side; the result is the list of theirs."""
    return Group(*members)


def chord(header: Iterable[Signature[Any]], body: Signature[Any]) -> Chord:
    """Run the header's calls side by side, then the body with the list of their results."""
    return Chord(header, body)


def _flattened(members: Iterable[Signature[Any] | Iterable[Signature[Any]]]) -> list[Signature[Any]]:
    flat: list[Signature[Any]] = []
    for member in members:
        if isinstance(member, Group):
            flat += member.members
        elif isinstance(member, Signature):
            flat.append(member)
        else:
            flat += _flattened(member)
    return flat


def _app_of(members: Sequence[Signature[Any]]) -> "SendingApp | None":
    return next((member._app for member in members if member._app is not None), None)


def _group_from(data: SignatureMap, app: "SendingApp") -> Group:
    members = [signature_from(one, app) for one in data["kwargs"].get("tasks", ())]
    return Group(members, app=app, options=cast(SendOptions, data["options"]))


register_kind("group", GROUP_TASK, _group_from)


def _chord_from(data: SignatureMap, app: "SendingApp") -> Chord:
    contents = data["kwargs"]
    header = contents.get("header", ())
    members = header["kwargs"]["tasks"] if isinstance(header, dict) else header
    return Chord(
        [signature_from(one, app) for one in members],
        signature_from(contents["body"], app),
        app=app,
        options=cast(SendOptions, data["options"]),
    )


register_kind("chord", CHORD_TASK, _chord_from)
