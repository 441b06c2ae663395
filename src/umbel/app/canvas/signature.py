"""Signature: a call as a value, to be sent later, with its options, links and stamps.

In messages a signature is the six-key map of Celery's protocol, so Umbel's and Celery's workers can run the
signatures of each other.

Stamps are headers on every message of a canvas, by which its tasks can be found and revoked. They are options
of a signature; `stamped_headers` names the options that are stamps. A visitor may return other stamps for
each signature. It is called in the order in which the parts would run.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast

from umbel.app.options import SendOptions, check_options, known_options
from umbel.app.request import CURRENT_REQUEST, Request, current_request
from umbel.app.results import AsyncResult
from umbel.app.sending.preparation import Prepared, first, is_unique, new_id, new_ids, prepare
from umbel.app.types import ResultTypes
from umbel.errors import ConfigurationError, NotRegistered
from umbel.protocol.delivery.sensitive import HIDDEN
from umbel.wire.steps import SignatureMap, check_signature

if TYPE_CHECKING:
    from umbel.app.app import App


# ---- stamping --------------------------------------------------------------------------------------

Stamps = dict[str, Any]


class StampingVisitor:
    """Chooses the stamps of each part of a canvas. Each method returns the stamps, or nothing."""

    def on_signature(self, sig: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for a single call."""
        return None

    def on_group_start(self, group: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for a group, before its members are visited."""
        return None

    def on_group_end(self, group: Any, **headers: Any) -> None:
        """Called after the members of a group."""

    def on_chain_start(self, chain: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for a chain, before its steps are visited."""
        return None

    def on_chain_end(self, chain: Any, **headers: Any) -> None:
        """Called after the steps of a chain."""

    def on_chord_header_start(self, sig: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for the header of a chord; by default as for a group."""
        return self.on_group_start(sig.header, **headers)

    def on_chord_header_end(self, sig: Any, **headers: Any) -> None:
        """Called after the header of a chord; by default as for a group."""
        self.on_group_end(sig.header, **headers)

    def on_chord_body(self, sig: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for the body of a chord."""
        return None

    def on_callback(self, callback: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for a callback (`link`)."""
        return None

    def on_errback(self, errback: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Stamps for an errback (`link_error`)."""
        return None


_NO_VISITOR = StampingVisitor()


def stamp_parts(
    whole: "Signature[Any]",
    parts: "Sequence[Signature[Any]]",
    visitor: StampingVisitor | None,
    append: bool,
    stamps: Mapping[str, Any],
    kind: str,
) -> Stamps:
    """Stamp the links and the parts of a chain, a group or the header of a chord; return the stamps of the
    parts.
    """
    start, end = (getattr(visitor or _NO_VISITOR, f"on_{kind}_{moment}") for moment in ("start", "end"))
    headers = merged(stamps, start(whole, **stamps), whole.options, append=append)
    stamp_links(whole, visitor, append, headers)
    for part in parts:
        part.stamp(visitor, append, **headers)
    end(whole, **headers)
    return headers


def stamp_links(
    signature: "Signature[Any]", visitor: StampingVisitor | None, append: bool, stamps: Mapping[str, Any]
) -> None:
    """Stamp the callbacks and errbacks of a signature; they do not inherit the stamps in its options."""
    asked = visitor or _NO_VISITOR
    for name, ask in (("link", asked.on_callback), ("link_error", asked.on_errback)):
        headers = dict(stamps)
        for linked in signature.linked(name):
            headers = merged(headers, ask(linked, **headers), {}, append=append)
            linked.stamp(visitor, append, **headers)


def merged(
    stamps: Mapping[str, Any], added: Mapping[str, Any] | None, options: Mapping[str, Any], *, append: bool
) -> Stamps:
    """The options that result from inherited stamps, those that a visitor added, and those of a signature."""
    whole = {name: value for name, value in stamps.items() if name != "stamped_headers"}
    own = {name: options[name] for name in options.get("stamped_headers") or () if name in options}
    names = [*_names(stamps), *_names(added or {}), *own]
    for more in (added or {}, own):
        for name, value in more.items():
            if name == "stamped_headers":
                continue
            known = whole.get(name)
            if name not in whole:
                whole[name] = value
            elif append or (isinstance(known, list) and isinstance(value, list)):
                whole[name] = [*_as_list(known), *_as_list(value)]
    return {**whole, "stamped_headers": list(dict.fromkeys(names))}


def _names(stamps: Mapping[str, Any]) -> Sequence[str]:
    """Which of these are stamps: those in `stamped_headers`, or all without it."""
    names: Sequence[str] = stamps.get("stamped_headers") or list(stamps)
    return names


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


# ---- signatures ------------------------------------------------------------------------------------

R = TypeVar("R")
C = TypeVar("C", list[Any], dict[str, Any])
_UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})


class Signature(Generic[R]):
    """One call: a task's name, arguments and options. If it is immutable, it takes no result of the step
    before.
    """

    subtask_type: str | None = None
    result_types: ResultTypes | None = None  # if the task's annotations do not describe its result

    def __init_subclass__(cls) -> None:
        if kind := vars(cls).get("subtask_type"):
            _KINDS[kind] = cls

    def __init__(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: SendOptions | None = None,
        *,
        immutable: bool = False,
        app: "App | None" = None,
    ) -> None:
        self.task = task
        self.args = list(args)
        self.kwargs = dict(kwargs) if kwargs else {}
        self.options: SendOptions = {**options} if options else {}
        self.immutable = immutable
        self._app = app

    @property
    def app(self) -> "App":
        """The app whose tasks it calls; ConfigurationError if it has none."""
        if self._app is None:
            raise ConfigurationError(f"signature of {self.task!r} belongs to no app; use app.signature(...)")
        return self._app

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], app: "App | None" = None) -> "Signature[Any]":
        """The signature from its map: a call, a chain, a group or a chord."""
        return signature_from(data, app)

    @classmethod
    def _from_map(cls, data: SignatureMap, app: "App | None") -> "Signature[Any]":
        options = cast(SendOptions, data["options"])
        return Signature(
            data["task"], data["args"], data["kwargs"], options, immutable=data["immutable"], app=app
        )

    def set(self, immutable: bool | None = None, **options: Unpack[SendOptions]) -> "Signature[R]":
        """Add options for sending; returns itself, so that calls can be chained."""
        if immutable is not None:
            self.set_immutable(immutable)
        check_options(options)
        self.options.update(options)
        return self

    def set_immutable(self, immutable: bool) -> None:
        """Choose whether it takes the result of the step before as its first argument."""
        self.immutable = immutable

    def clone(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> "Signature[R]":
        """A separate copy, with these arguments in front and these options on top."""
        if options:
            check_options(options)
        copy: Signature[R] = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.args = _copied(self.args, self.args)
        copy.kwargs = _copied(self.kwargs, self.kwargs.values()) if self.kwargs else {}
        own = cast(dict[str, Any], self.options)
        copy.options = cast(SendOptions, _copied(own, own.values())) if own else {}
        # New arguments are not copied: the result of a chain's step may be large.
        if args and not self.immutable:
            copy.args = [*args, *copy.args]
        if kwargs and not self.immutable:
            copy.kwargs.update(kwargs)
        if options:
            copy.options.update(options)
        return copy

    def link(self, callback: "Signature[Any]") -> Any:
        """Send `callback` with the result once this call has succeeded; returns the callback."""
        self.options["link"] = with_one_more(self.options.get("link"), callback)
        return callback

    def link_error(self, errback: "Signature[Any]") -> Any:
        """Send `errback` with this call's id if it fails; returns the errback."""
        self.options["link_error"] = with_one_more(self.options.get("link_error"), errback)
        return errback

    def on_error(self, errback: "Signature[Any]") -> "Signature[R]":
        """The same as `link_error`, but returns the signature itself."""
        self.link_error(errback)
        return self

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> "Signature[R]":
        """Put these headers on its messages, by which its tasks can be found and revoked; returns itself.

        `visitor` adds stamps for each signature. A stamp that exists already is replaced, or with
        `append_stamps` joined with the new one in a list.
        """
        stamp_links(self, visitor, append_stamps, stamps)
        added = (visitor or _NO_VISITOR).on_signature(self, **stamps)
        headers = merged(stamps, added, self.options, append=append_stamps)
        return self.set(**cast(SendOptions, headers))

    def linked(self, name: str) -> "list[Signature[Any]]":
        """Its callbacks (`link`) or errbacks (`link_error`), as signatures."""
        options = cast(dict[str, Any], self.options)
        if name not in options:
            return []
        found = options[name] = [signature_from(value, self._app) for value in listed(options[name])]
        return list(found)

    def take_links(self) -> "tuple[list[Signature[Any]], list[Signature[Any]]]":
        """Remove the callbacks and errbacks from its options, and return them as signatures."""
        links = self.linked("link"), self.linked("link_error")
        for name in ("link", "link_error"):
            cast(dict[str, Any], self.options).pop(name, None)
        return links

    def __or__(self, other: "Signature[Any]") -> "Signature[Any]":
        if not isinstance(other, Signature):
            return NotImplemented
        combined: Signature[Any] = _KINDS["chain"].combined(self, other)  # type: ignore[attr-defined]
        return combined

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[R]:
        """Send it with these arguments in front."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """Send it, with these arguments in front and these options on top."""
        call = self.clone(args, kwargs, **options)
        if call.is_unique:
            return self.app.send_unique(call.task, call.args, call.kwargs, call.options)
        call.freeze()
        if not call.sends_nothing:
            self.app.publish(call.prepare(sender=current_request()))
        result: AsyncResult[R] = call.handle()
        return result

    async def adelay(self, *args: Any, **kwargs: Any) -> AsyncResult[R]:
        """Send it, without blocking the event loop."""
        return await self.aapply_async(args, kwargs)

    async def aapply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """The same as `apply_async`, without blocking the event loop."""
        call = self.clone(args, kwargs, **options)
        if call.is_unique:
            return await self.app.asend_unique(call.task, call.args, call.kwargs, call.options)
        call.freeze()
        if not call.sends_nothing:
            app, sender = self.app, current_request()
            deadline = app.send_deadline()
            batch = await app.clients.prepare(lambda: call.prepare(sender=sender), deadline)
            await app.apublish(batch, deadline)
        result: AsyncResult[R] = call.handle()
        return result

    @property
    def is_unique(self) -> bool:
        """Whether it is a call of a unique task: not sent while a call with the same key waits or runs."""
        if type(self) is not Signature:
            return False
        known = self.app.tasks.get(self.task)
        return is_unique(known.options if known else None, self.options)

    @property
    def sends_nothing(self) -> bool:
        """Whether it contains no call, such as a group without members; its result is available at once."""
        return False

    def election(
        self, *, policy: str | None = None, expires: float | None = None, timeout: float = 0.0
    ) -> AsyncResult[R]:
        """Have an elected worker send it once. The election has the id of the task."""
        call = self.clone()
        task_id = call.freeze()
        self.app.control.election(
            task_id, "task", call.to_map(), policy=policy, expires=expires, timeout=timeout
        )
        result: AsyncResult[R] = call.handle()
        return result

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """Make the messages that are sent for it."""
        return [self.prepare_as("", sender=sender)]

    def prepare_as(self, task_id: str, *, sender: Request | None = None) -> Prepared:
        """Make the message of this call, with that id if its options contain none."""
        app = self.app
        known = app.find_task(self.task)
        if known is not None:
            known.check_arguments(self.args, self.kwargs)
        return prepare(app, self.task, self.args, self.kwargs, self.options, sender=sender, task_id=task_id)

    def handle(self, parent: Any = None) -> Any:
        """The result handle of a signature that has its id."""
        app = self.app
        task = app.find_task(self.task)
        ignored = first(
            self.options.get("ignore_result"),
            None if task is None else task.options.ignore_result,
            app.settings.task_ignore_result,
        )
        types = self.result_types or (None if task is None else task.options.types)
        return AsyncResult(self.options["task_id"], app=app, parent=parent, ignored=ignored, types=types)

    def absorb(self, following: "Signature[Any]") -> "Signature[Any] | None":
        """Return the signature into which this one and its successor in a chain merge.

        None if they cannot be merged.
        """
        return None

    def as_steps(self) -> "list[Signature[Any]]":
        """The steps that it adds to a chain."""
        return [self]

    def join_group(self, group_id: str, place: int | None) -> None:
        """Make it a member of a group: its last task carries the id of the group and the index."""
        self.options["group_id"] = group_id
        if place is not None:
            self.options["group_index"] = place

    @property
    def is_member(self) -> bool:
        """Whether its last task belongs to a group."""
        return "group_id" in self.options

    def join_chord(self, body: SignatureMap) -> None:
        """Make it a part of a chord: its last task carries the body."""
        self.options["chord"] = body

    def parts(self) -> int:
        """How many results a chord gets from it, once it has joined one."""
        return 1

    def apply(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> AsyncResult[R]:
        """Run it here, through the same path as in a worker."""
        if self.sends_nothing:
            return self.apply_async(args, kwargs)
        with self.app.eager():
            return self.apply_async(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the task's function directly, in this process."""
        call = self.clone(args, kwargs)
        task = self.app.find_task(call.task)
        if task is None:
            raise NotRegistered.named(call.task)
        given, named = call.args, call.kwargs
        if task.options.types is not None:  # they may have come in a message
            given, named = task.options.types.parse(given, named)
        result: R = task(*given, **named)
        return result

    def freeze(self, task_id: str | None = None) -> str:
        """Fix the id it will be sent under, and return it."""
        fixed = self.options.get("task_id")
        if fixed is None:
            fixed = self.options["task_id"] = task_id or new_id()
        return fixed

    def to_map(self) -> SignatureMap:
        """The map of Celery's protocol that travels in messages."""
        options = dict(self.options)
        for name in ("link", "link_error"):
            if name in options:
                options[name] = [_as_map(linked) for linked in listed(options[name])]
        return {
            "task": self.task,
            "args": self.args,
            "kwargs": self.kwargs,
            "options": options,
            "subtask_type": self.subtask_type,
            "immutable": self.immutable,
        }

    __json__ = to_map  # as an argument or a result it arrives as this map

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without its app, as the map that a message carries."""
        return Signature.from_dict, (self.to_map(),)

    def __copy__(self) -> "Signature[R]":
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Signature[R]":
        return self.clone()  # the app is shared, not copied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.to_map() == other.to_map()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        args, kwargs = self._shown()
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{self.task}({', '.join(given)})"

    def _shown(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments without sensitive ones. A chain may put a result in front; then all positions are
        hidden.
        """
        task = None if self._app is None else self._app.find_task(self.task)
        if task is None or (hides := task.options.hides) is None:
            return self.args, self.kwargs
        args, kwargs = hides.hide(self.args, self.kwargs)
        return args if self.immutable else [HIDDEN] * len(args), kwargs


_KINDS: dict[str, type[Signature[Any]]] = {}  # chain, group and chord


def signature_from(value: object, app: "App | None") -> Signature[Any]:
    """The signature from a map of a message or a user. A Signature is returned, with `app` if it has none."""
    if isinstance(value, Signature):
        if value._app is None and app is not None:
            value = value.clone()
            value._app = app
        return value
    data = check_signature(value)
    data["options"] = known_options(data["options"])
    kind = _KINDS.get(data["subtask_type"] or "", Signature)  # not by its name: a task may be named "group"
    return kind._from_map(data, app)


def _copied(values: C, items: Iterable[Any]) -> C:
    """A separate list or map: `deepcopy` is needed only for items that can change."""
    return values.copy() if _UNCHANGING.issuperset(map(type, items)) else deepcopy(values)


def with_one_more(linked: Any, signature: Signature[Any]) -> list[Any]:
    """The callbacks with this one added, unless it is linked already."""
    known = listed(linked)
    return known if any(callback == signature for callback in known) else [*known, signature]


def listed(value: Any) -> list[Any]:
    """The value as a list: none, one, or a copy of several."""
    if not value:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_map(value: Any) -> SignatureMap:
    return value.to_map() if isinstance(value, Signature) else check_signature(value)


def prepare_many(signatures: Iterable[Signature[Any]]) -> tuple[list[Prepared], list[AsyncResult[Any]]]:
    """Make the messages of calls that are published together; return them and the result handles of the
    calls.
    """
    calls, sender = list(signatures), CURRENT_REQUEST.get()
    batch: list[Prepared] = []
    results: list[AsyncResult[Any]] = []
    for call, task_id in zip(calls, new_ids(len(calls)), strict=True):
        if type(call) is Signature:  # its one message can be made without a copy of the call
            prepared = call.prepare_as(task_id, sender=sender)
            batch.append(prepared)
            results.append(prepared.result(call.app))
        else:
            copy = call.clone()
            copy.freeze()
            batch += copy.prepare(sender=sender)
            results.append(copy.handle())
    return batch, results
