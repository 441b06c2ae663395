"""Group and chord: calls that run in parallel, and one more call that is given the list of their results.
With them the tasks that every app has: `map`, `starmap`, and the task that collects the results of a group.

A group is sent as the messages of its members; each carries the id of the group and its index in the group.
The members of a group inside a group are members of the outer group. A group and its successor in a chain
become a chord: its parts carry the body, which is sent when the last part has ended
(`running/follow_ups.py`).

A member that ends in a group brings several parts. They are counted one by one. The result backend records
which of them belong together, so that the body is given a list in that place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from umbel.app.canvas.chain import Chain
from umbel.app.canvas.signature import (
    Signature,
    StampingVisitor,
    merged,
    signature_from,
    stamp_parts,
)
from umbel.app.options import SendOptions
from umbel.app.request import Request
from umbel.app.results import AsyncResult, GroupResult
from umbel.app.sending.preparation import Prepared, arrange, new_id
from umbel.app.types import EachResult
from umbel.wire.steps import SignatureMap

if TYPE_CHECKING:
    from umbel.app.app import App


GROUP_TASK, CHORD_TASK = "celery.group", "celery.chord"


class Group(Signature[list[Any]]):
    """Calls that run in parallel. Arguments and options that are given when it is sent go to each member.

    A group without members sends nothing, and its result is an empty list.
    """

    subtask_type = "group"

    def __init__(
        self,
        *members: Signature[Any] | Iterable[Signature[Any]],
        app: "App | None" = None,
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
        """A copy; the arguments go to every member."""
        members = [member.clone(args, kwargs) for member in self.members]
        return Group(members, app=self._app, options=cast(SendOptions, {**self.options, **options}))

    @property
    def tasks(self) -> list[Signature[Any]]:
        """The members, under Celery's name."""
        return self.members

    def delay(self, *args: Any, **kwargs: Any) -> GroupResult:  # type: ignore[override]
        """Send all members with these arguments in front."""
        return self.apply_async(args, kwargs)

    def apply_async(  # type: ignore[override]
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> GroupResult:
        """Send all members, each with these arguments in front and these options on top."""
        _refuse_links(options)
        return _outermost(super().apply_async(args, kwargs, **options))

    async def adelay(self, *args: Any, **kwargs: Any) -> GroupResult:  # type: ignore[override]
        """Send all members, without blocking the event loop."""
        return await self.aapply_async(args, kwargs)

    async def aapply_async(  # type: ignore[override]
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> GroupResult:
        """The same as `apply_async`, without blocking the event loop."""
        _refuse_links(options)
        return _outermost(await super().aapply_async(args, kwargs, **options))

    def __call__(self, *args: Any, **options: Any) -> GroupResult:  # type: ignore[override]
        """Send it."""
        return self.apply_async(args, **options)

    def set_immutable(self, immutable: bool) -> None:
        """Choose for every member whether it takes the result of the step before."""
        for member in self.members:
            member.set_immutable(immutable)

    def link(self, callback: Signature[Any]) -> Any:
        """Send `callback` once the first member has succeeded; it is given no result.

        No member knows the results of the others. A task that needs them must follow the group in a chain.
        """
        return self.members[0].link(callback.clone().set(immutable=True))

    def link_error(self, errback: Signature[Any]) -> Any:
        """Send `errback` for each member that fails; returns those that were linked."""
        return tuple(member.link_error(errback.clone()) for member in self.members)

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> "Group":
        """Stamp all its members."""
        stamp_parts(self, self.members, visitor, append_stamps, stamps, "group")
        return self

    def freeze(self, task_id: str | None = None) -> str:
        """Fix the ids of the group and its members; return the group's."""
        group_id: str = self.options.setdefault("task_id", task_id or new_id())
        for member in self.members:
            member.freeze()
        return group_id

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """Make the messages of all members, each with the id of the group and its index."""
        group_id = self.freeze()
        if not self.members:
            return []
        shared = {name: value for name, value in self.options.items() if name not in _OF_THE_GROUP}
        batch: list[Prepared] = []
        if not self._is_part:
            self._number(group_id, 0)
        callbacks, errbacks = self.take_links()
        for callback in callbacks:
            self.link(callback)
        for errback in errbacks:
            self.link_error(errback)
        for member in self.members:
            if shared:
                member.options = cast(SendOptions, {**shared, **member.options})
            batch += member.prepare(sender=sender)
        return batch

    def join_group(self, group_id: str, place: int | None) -> None:
        """Take this place in an outer group. As a part of a chord, its members are numbered from there."""
        super().join_group(group_id, place)
        if self._is_part and place is not None:
            self._number(group_id, place)

    def join_chord(self, body: SignatureMap) -> None:
        """Make each of its tasks a part, so that the chord is given all their results."""
        super().join_chord(body)
        for member in self.members:
            member.join_chord(body)

    def parts(self) -> int:
        """How many results a chord gets from it."""
        return sum(member.parts() for member in self.members) if self._is_part else 1

    @property
    def _is_part(self) -> bool:
        return "chord" in self.options

    def _number(self, group_id: str, place: int) -> None:
        for member in self.members:
            member.join_group(group_id, place)
            place += member.parts()

    def handle(self, parent: Any = None) -> Any:
        """The GroupResult of a group that has its ids."""
        results = [member.handle() for member in self.members]
        return GroupResult(self.options["task_id"], results, app=self._app, parent=parent)

    @property
    def sends_nothing(self) -> bool:
        """Whether it has no members."""
        return not self.members

    def as_steps(self) -> list[Signature[Any]]:
        """A group of one is its member, an empty one no step, as in Celery."""
        return self.members if len(self.members) < 2 else [self]

    def absorb(self, following: Signature[Any]) -> Signature[Any]:
        """The chord of this group and its successor, which waits for all members."""
        return Chord(self.members, following, app=self._app)

    def __len__(self) -> int:
        return len(self.members)

    def to_map(self) -> SignatureMap:
        """The map of Celery's protocol, with the members in `tasks`."""
        whole = super().to_map()
        whole["kwargs"] = {"tasks": [member.to_map() for member in self.members]}
        return whole

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.members))})"

    @classmethod
    def _from_map(cls, data: SignatureMap, app: "App | None") -> "Group":
        members = [signature_from(member, app) for member in data["kwargs"].get("tasks", ())]
        return Group(members, app=app, options=cast(SendOptions, data["options"]))


def _refuse_links(options: SendOptions) -> None:
    if options.get("link") or options.get("link_error"):
        raise TypeError("a group has no callbacks: make a chord, or link its members")


def _outermost(sent: Any) -> GroupResult:
    """The result of the only member if that ends in a group, as in Celery; else the given result."""
    result = cast(GroupResult, sent)
    alone = result.results[0] if len(result) == 1 else None
    return alone if isinstance(alone, GroupResult) else result


_OF_THE_GROUP = frozenset({"task_id", "chain", "chord", "link", "link_error", "group_id", "group_index"})


class Chord(Signature[Any]):
    """Calls that run in parallel, and one more that is given the list of their results."""

    subtask_type = "chord"

    def __init__(
        self,
        header: Iterable[Signature[Any]],
        body: Signature[Any],
        *,
        app: "App | None" = None,
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
        """A copy; the arguments go to every member of the header."""
        header = self.header.clone(args, kwargs)
        whole = cast(SendOptions, {**self.options, **options})
        return Chord([header], self.body.clone(), app=self._app, options=whole)

    @property
    def tasks(self) -> list[Signature[Any]]:
        """The members of the header, under Celery's name."""
        return self.header.members

    def set_immutable(self, immutable: bool) -> None:
        """The header takes no arguments; the body still gets its results."""
        self.header.set_immutable(immutable)

    def link(self, callback: Signature[Any]) -> Any:
        """Send `callback` once the body has succeeded."""
        self.body.link(callback)
        return callback

    def link_error(self, errback: Signature[Any]) -> Any:
        """Send `errback` if the body fails, which it also does if a part fails; inner chords link it too."""
        for member in self.header.members:
            if isinstance(member, Chord):
                member.link_error(errback)
        self.body.link_error(errback)
        return errback

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> "Chord":
        """Stamp its header; the body as well, if there is a visitor, as in Celery."""
        members = self.header.members
        headers = stamp_parts(self, members, visitor, append_stamps, stamps, "chord_header")
        if visitor is not None:
            added = visitor.on_chord_body(self, **headers)
            headers = merged(headers, added, self.options, append=append_stamps)
            self.body.stamp(visitor, append_stamps, **headers)
        return self

    def freeze(self, task_id: str | None = None) -> str:
        """Fix the ids of header and body; return the body's."""
        self.header.freeze()
        return self.body.freeze(task_id or self.options.get("task_id"))

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """Make the messages of the header, each carrying the body; without a header, that of the body."""
        self.freeze()
        self._hand_options_to_body()
        if not self.header.members:
            return self.body.clone([[]]).prepare(sender=sender)
        if self.body.sends_nothing:  # no call takes the results: the header is sent as a group
            return self.header.prepare(sender=sender)
        group_id = self.header.freeze()
        if not self.body.is_member:  # a body that is a part of an outer chord stays its part
            self.body.join_group(group_id, None)
        body = self._travelling_body()
        for member in self.header.members:
            member.join_chord(body)
        self._save_shape()
        size = sum(member.parts() for member in self.header.members)
        arrange(self.app, lambda backend: backend.start_chord(group_id, size))
        parts = self.header.prepare(sender=sender)
        if (signal := self.app.signals.before_chord_publish).receivers:
            signal.send(group_id=group_id, parts=parts)
        return parts

    def _travelling_body(self) -> SignatureMap:
        """The map of the body. A chain travels as its first step, so that workers of Celery can fail the
        others too.
        """
        body = self.body
        if isinstance(body, Chain) and body.steps and body.steps[0].subtask_type is None:
            return body.first_step().to_map()
        return body.to_map()

    def _save_shape(self) -> None:
        """Save the header's structure under Celery's key: a worker of either kind may bring the last part."""
        header: GroupResult = self.header.handle()
        if any(isinstance(result, GroupResult) for result in header):
            arrange(self.app, header.save_in)

    def handle(self, parent: Any = None) -> Any:
        """The result handle of the body; its `parent` is the header's result."""
        return self.body.handle(self.header.handle(parent))

    @property
    def sends_nothing(self) -> bool:
        """Whether neither header nor body contains a call."""
        return self.header.sends_nothing and self.body.sends_nothing

    def absorb(self, following: Signature[Any]) -> Signature[Any]:
        """The chord whose body is followed by this signature."""
        return Chord([self.header], self.body | following, app=self._app, options=self.options)

    def join_group(self, group_id: str, place: int | None) -> None:
        """Make its body a member of the group."""
        self.body.join_group(group_id, place)

    @property
    def is_member(self) -> bool:
        """Whether its body belongs to a group."""
        return self.body.is_member

    def join_chord(self, body: SignatureMap) -> None:
        """Make its body a part of the outer chord."""
        self.body.join_chord(body)

    def parts(self) -> int:
        """How many results an outer chord gets from its body."""
        return self.body.parts()

    def __call__(self, body: Signature[Any] | None = None, **options: Any) -> AsyncResult[Any]:
        """Send it, with another body if one is given."""
        whole = self if body is None else Chord([self.header], body, app=self._app, options=self.options)
        return whole.apply_async(**options)

    def to_map(self) -> SignatureMap:
        """The map of Celery's protocol, with `header` and `body`."""
        whole = super().to_map()
        header = [member.to_map() for member in self.header.members]
        whole["kwargs"] = {"header": header, "body": self.body.to_map(), "kwargs": {}}
        return whole

    def __repr__(self) -> str:
        return f"chord({self.header!r}, {self.body!r})"

    @classmethod
    def _from_map(cls, data: SignatureMap, app: "App | None") -> "Chord":
        contents = data["kwargs"]
        header = contents.get("header", ())
        members = header["kwargs"]["tasks"] if isinstance(header, dict) else header
        return Chord(
            [signature_from(member, app) for member in members],
            signature_from(contents["body"], app),
            app=app,
            options=cast(SendOptions, data["options"]),
        )

    def _hand_options_to_body(self) -> None:
        """Give the links and the end of the chain to the body, and the options for sending to the header."""
        callbacks, errbacks = self.take_links()
        for callback in callbacks:
            self.body.link(callback)
        for errback in errbacks:
            self.body.link_error(errback)
        of_the_end = {name: value for name, value in self.options.items() if name in _OF_THE_END and value}
        self.body.options = cast(SendOptions, {**self.body.options, **of_the_end})
        of_each = {name: value for name, value in self.options.items() if name in _OF_EACH}
        self.header.options = cast(SendOptions, {**of_each, **self.header.options})


_OF_THE_END = frozenset({"chain", "chord"})
_OF_EACH = frozenset({"queue", "priority", "countdown", "eta", "expires"})


def group(*members: Signature[Any] | Iterable[Signature[Any]]) -> Group:
    """A group: calls that run in parallel. Its result is the list of their results."""
    return Group(*members)


def _flattened(members: Iterable[Signature[Any] | Iterable[Signature[Any]]]) -> list[Signature[Any]]:
    flat: list[Signature[Any]] = []
    for member in members:
        if isinstance(member, Group):
            flat += member.members
        elif isinstance(member, Signature):
            flat += [] if member.sends_nothing else [member]
        else:
            flat += _flattened(member)
    return flat


def _app_of(members: Sequence[Signature[Any]]) -> "App | None":
    return next((member._app for member in members if member._app is not None), None)


class OpenChord:
    """A header that waits for its body: `chord(header)(body)` sends both."""

    def __init__(self, header: Iterable[Signature[Any]]) -> None:
        self._header = list(header.members if isinstance(header, Group) else header)

    def __call__(self, body: Signature[Any], **options: Any) -> AsyncResult[Any]:
        return Chord(self._header, body).apply_async(**options)


@overload
def chord(header: Iterable[Signature[Any]], body: Signature[Any]) -> Chord: ...
@overload
def chord(header: Iterable[Signature[Any]], body: None = None) -> OpenChord: ...
def chord(header: Iterable[Signature[Any]], body: Signature[Any] | None = None) -> Chord | OpenChord:
    """Run the header's calls in parallel, then the body with the list of their results.

    Without a body it waits for one: `chord(header)(body)` sends both.
    """
    return OpenChord(header) if body is None else Chord(header, body)


# ---- the tasks that every app has ------------------------------------------------------------------
#
# They have Celery's names, and run for `map`, `starmap`, `chunks` and `replace`.

MAP_TASK, STARMAP_TASK, CHUNKS_TASK = "celery.map", "celery.starmap", "celery.chunks"
ACCUMULATE_TASK, CLEANUP_TASK = "celery.accumulate", "celery.backend_cleanup"
BUILTIN_TASKS = frozenset({MAP_TASK, STARMAP_TASK, CHUNKS_TASK, ACCUMULATE_TASK, CLEANUP_TASK})


def builtin_functions(app: "App") -> dict[str, Callable[..., Any]]:
    """The functions of the tasks that every app has, by the tasks' names."""

    def run_map(task: Any, it: list[Any]) -> list[Any]:
        call = signature_from(task, app)
        return [call(item) for item in it]

    def run_starmap(task: Any, it: list[list[Any]]) -> list[Any]:
        call = signature_from(task, app)
        return [call(*items) for items in it]

    def run_chunks(task: Any, it: list[list[Any]], n: int) -> list[list[Any]]:
        return [run_starmap(task, part) for part in in_parts(it, n)]

    def accumulate(*args: Any, index: int | None = None, **_: Any) -> Any:
        return args if index is None else args[index]

    def clean_up() -> None:
        """Do nothing, because results expire. Celery's scheduler sends this task once a day."""

    return {
        MAP_TASK: run_map,
        STARMAP_TASK: run_starmap,
        CHUNKS_TASK: run_chunks,
        ACCUMULATE_TASK: accumulate,
        CLEANUP_TASK: clean_up,
    }


def map_signature(app: "App", name: str, task: Signature[Any], items: Iterable[Any]) -> Signature[list[Any]]:
    """A call of a built-in task that calls `task` for each item; its result is parsed item by item."""
    made: Signature[list[Any]] = Signature(name, kwargs={"task": task.to_map(), "it": list(items)}, app=app)
    known = app.find_task(task.task)
    if known is not None and known.options.types is not None:
        made.result_types = EachResult(known.options.types)
    return made


def in_parts(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    """Yield the items in lists of `size`, the last one shorter; ValueError if `size` is below 1."""
    if size < 1:
        raise ValueError(f"chunk size is {size}; it must be at least 1")
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
