"""Group and chord: calls side by side, their results together, and one more call that is given those.

A group is sent as its members' messages, each marked with the group's id and its place in it. A
group inside a group is flattened: what counts is the tasks. What follows a group in a chain makes a
chord of both: its parts carry the body, which is sent when the last of them has ended
(`running/chord_parts.py`).

A member that ends in a group brings several parts. They are counted one by one; which of them belong together
is kept in the result backend, so that the body is given a list in that place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from umbel.app.canvas.chain import Chain
from umbel.app.canvas.signature import Signature, listed, register_kind, signature_from
from umbel.app.canvas.stamping import StampingVisitor, merged, stamp_links
from umbel.app.results import AsyncResult, GroupResult
from umbel.app.running.request import Request
from umbel.app.sending.announcing import announced_parts
from umbel.app.sending.arranging import arrange
from umbel.app.sending.options import SendOptions
from umbel.app.sending.prepare import Prepared, new_id
from umbel.wire.task import SignatureMap

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

GROUP_TASK, CHORD_TASK = "celery.group", "celery.chord"


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

    @property
    def tasks(self) -> list[Signature[Any]]:
        return self.members

    def delay(self, *args: Any, **kwargs: Any) -> GroupResult:  # type: ignore[override]
        return self.apply_async(args, kwargs)

    def apply_async(  # type: ignore[override]
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> GroupResult:
        """Send all members; further arguments go first in each, further options are for each."""
        _refuse_links(options)
        return _outermost(super().apply_async(args, kwargs, **options))

    async def adelay(self, *args: Any, **kwargs: Any) -> GroupResult:  # type: ignore[override]
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
        for member in self.members:
            member.set_immutable(immutable)

    def link(self, callback: Signature[Any]) -> Any:
        """Send `callback` once the first member has succeeded; it is given no result.

        No member knows the results of the others: what needs them follows the group in a chain.
        """
        return self.members[0].link(callback.clone().set(immutable=True))

    def link_error(self, errback: Signature[Any]) -> Any:
        """Send `errback` for each member that fails; returns those that were linked."""
        return tuple(member.link_error(errback.clone()) for member in self.members)

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> "Group":
        """Stamp all its members."""
        said = None if visitor is None else visitor.on_group_start(self, **stamps)
        headers = merged(stamps, said, self.options, append=append_stamps)
        stamp_links(self, visitor, append_stamps, headers)
        for member in self.members:
            member.stamp(visitor, append_stamps, **headers)
        if visitor is not None:
            visitor.on_group_end(self, **headers)
        return self

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
        self._hand_links_to_members()
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

    def _hand_links_to_members(self) -> None:
        """Those that were given as options of the whole."""
        for callback in listed(self.options.pop("link", None)):
            self.link(signature_from(callback, self._app))
        for errback in listed(self.options.pop("link_error", None)):
            self.link_error(signature_from(errback, self._app))

    def handle(self, parent: Any = None) -> Any:
        results = [member.handle() for member in self.members]
        return GroupResult(self.options["task_id"], results, app=self.app, parent=parent)

    def as_steps(self) -> list[Signature[Any]]:
        """A group of one is its member, of none nothing, as Celery has it."""
        return self.members if len(self.members) < 2 else [self]

    def absorb(self, following: Signature[Any]) -> Signature[Any]:
        """What follows a group waits for all of it: that is a chord."""
        return Chord(self.members, following, app=self._app)

    def __len__(self) -> int:
        return len(self.members)

    def to_map(self) -> SignatureMap:
        whole = super().to_map()
        whole["kwargs"] = {"tasks": [member.to_map() for member in self.members]}
        return whole

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.members))})"


def _refuse_links(options: SendOptions) -> None:
    if options.get("link") or options.get("link_error"):
        raise TypeError("a group has no callbacks of its own: make a chord, or link its members")


def _outermost(sent: Any) -> GroupResult:
    """If its one member ends in a group, that is the result, as Celery has it."""
    result = cast(GroupResult, sent)
    alone = result.results[0] if len(result) == 1 else None
    return alone if isinstance(alone, GroupResult) else result


_OF_THE_GROUP = frozenset({"task_id", "chain", "chord", "link", "link_error", "group_id", "group_index"})


class Chord(Signature[Any]):
    """Calls side by side, and one more with the list of their results."""

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

    @property
    def tasks(self) -> list[Signature[Any]]:
        return self.header.members

    def set_immutable(self, immutable: bool) -> None:
        """The header takes no arguments; the body still gets its results."""
        self.header.set_immutable(immutable)

    def link(self, callback: Signature[Any]) -> Any:
        """Send `callback` once the body has succeeded."""
        self.body.link(callback)
        return callback

    def link_error(self, errback: Signature[Any]) -> Any:
        """Send `errback` if the body fails, which it also does when a part fails; so for chords inside."""
        for member in self.header.members:
            if isinstance(member, Chord):
                member.link_error(errback)
        self.body.link_error(errback)
        return errback

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> "Chord":
        """Stamp its header; the body as well, if there is a visitor, as Celery has it."""
        said = None if visitor is None else visitor.on_chord_header_start(self, **stamps)
        headers = merged(stamps, said, self.options, append=append_stamps)
        stamp_links(self, visitor, append_stamps, headers)
        for member in self.header.members:
            member.stamp(visitor, append_stamps, **headers)
        if visitor is not None:
            visitor.on_chord_header_end(self, **headers)
            more = visitor.on_chord_body(self, **headers)
            self.body.stamp(
                visitor, append_stamps, **merged(headers, more, self.options, append=append_stamps)
            )
        return self

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
        if not self.body.is_member:  # a body that is itself a part stays one of the outer chord
            self.body.join_group(group_id, None)
        body = self._travelling_body()
        for member in self.header.members:
            member.join_chord(body)
        self._save_shape()
        size = sum(member.parts() for member in self.header.members)
        arrange(self.app, lambda backend: backend.start_chord(group_id, size))
        return announced_parts(self.app, group_id, self.header.prepare(sender=sender))

    def _travelling_body(self) -> SignatureMap:
        """A chain travels as its first step with the others behind it: Celery's workers fail those too."""
        if isinstance(self.body, Chain) and self.body.steps and self.body.steps[0].subtask_type is None:
            first, *rest = self.body.as_steps()
            behind = self.body.options.get("chain") or []
            first.options["chain"] = [*behind, *(step.to_map() for step in reversed(rest))]
            return first.to_map()
        return self.body.to_map()

    def _save_shape(self) -> None:
        """Under Celery's key, as its clients do it: either kind of worker may bring the last part."""
        header: GroupResult = self.header.handle()
        if any(isinstance(one, GroupResult) for one in header):
            arrange(self.app, header.save_in)

    def handle(self, parent: Any = None) -> Any:
        return self.body.handle(self.header.handle(parent))

    def absorb(self, following: Signature[Any]) -> Signature[Any]:
        return Chord([self.header], self.body | following, app=self._app, options=self.options)

    def join_group(self, group_id: str, place: int | None) -> None:
        self.body.join_group(group_id, place)

    @property
    def is_member(self) -> bool:
        return self.body.is_member

    def join_chord(self, body: SignatureMap) -> None:
        self.body.join_chord(body)

    def parts(self) -> int:
        return self.body.parts()

    def __call__(self, body: Signature[Any] | None = None, **options: Any) -> AsyncResult[Any]:
        """Send it, with another body if one is given."""
        whole = self if body is None else Chord([self.header], body, app=self._app, options=self.options)
        return whole.apply_async(**options)

    def to_map(self) -> SignatureMap:
        whole = super().to_map()
        header = [member.to_map() for member in self.header.members]
        whole["kwargs"] = {"header": header, "body": self.body.to_map(), "kwargs": {}}
        return whole

    def __repr__(self) -> str:
        return f"chord({self.header!r}, {self.body!r})"

    def _hand_options_to_body(self) -> None:
        """What was said of the whole is meant for its end; the header gets the sending options."""
        for callback in listed(self.options.pop("link", None)):
            self.body.link(signature_from(callback, self._app))
        for errback in listed(self.options.pop("link_error", None)):
            self.body.link_error(signature_from(errback, self._app))
        of_the_end = {name: value for name, value in self.options.items() if name in _OF_THE_END and value}
        self.body.options = cast(SendOptions, {**self.body.options, **of_the_end})
        of_each = {name: value for name, value in self.options.items() if name in _OF_EACH}
        self.header.options = cast(SendOptions, {**of_each, **self.header.options})


_OF_THE_END = frozenset({"chain", "chord"})
_OF_EACH = frozenset({"queue", "priority", "countdown", "eta", "expires"})


def group(*members: Signature[Any] | Iterable[Signature[Any]]) -> Group:
    """Calls side by side; the result is the list of theirs."""
    return Group(*members)


def _flattened(members: Iterable[Signature[Any] | Iterable[Signature[Any]]]) -> list[Signature[Any]]:
    flat: list[Signature[Any]] = []
    for member in members:
        if isinstance(member, Group):
            flat += member.members
        elif isinstance(member, Chain) and not member.steps:
            continue  # nothing to send, and no result
        elif isinstance(member, Signature):
            flat.append(member)
        else:
            flat += _flattened(member)
    return flat


def _app_of(members: Sequence[Signature[Any]]) -> "SendingApp | None":
    return next((member._app for member in members if member._app is not None), None)


def _group_from(data: SignatureMap, app: "SendingApp | None") -> Group:
    members = [signature_from(one, app) for one in data["kwargs"].get("tasks", ())]
    return Group(members, app=app, options=cast(SendOptions, data["options"]))


register_kind("group", GROUP_TASK, _group_from)


def _chord_from(data: SignatureMap, app: "SendingApp | None") -> Chord:
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
