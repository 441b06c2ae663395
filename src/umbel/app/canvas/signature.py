"""Signature: a call as a value, that can be kept, combined and sent later.

A signature travels in messages as the six-key map of Celery's protocol, so both kinds of worker
can run what the other composed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast

from umbel.app.canvas.stamping import Stamped, StampingVisitor, stamp_signature
from umbel.app.results import AsyncResult
from umbel.app.running.request import Request, current_request
from umbel.app.sending.options import SendOptions, check_options, known_options
from umbel.app.sending.prepare import Prepared, is_unique, new_id
from umbel.app.sending.uniqueness import send_unique
from umbel.app.types.call_types import ResultTypes
from umbel.errors import ConfigurationError, NotRegistered
from umbel.protocol.delivery.sensitive import HIDDEN
from umbel.wire.task import SignatureMap, check_signature

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

R = TypeVar("R")
C = TypeVar("C", list[Any], dict[str, Any])
_UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})


class Signature(Stamped, Generic[R]):
    """One call: a task's name, arguments and options. Immutable ones take no parent's result."""

    subtask_type: str | None = None
    result_types: ResultTypes | None = None  # where the task does not say what its result is

    def __init__(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: SendOptions | None = None,
        *,
        immutable: bool = False,
        app: "SendingApp | None" = None,
    ) -> None:
        self.task = task
        self.args = list(args)
        self.kwargs = dict(kwargs) if kwargs else {}
        self.options: SendOptions = {**options} if options else {}
        self.immutable = immutable
        self._app = app

    @property
    def app(self) -> "SendingApp":
        if self._app is None:
            raise ConfigurationError(f"signature of {self.task!r} belongs to no app; use app.signature(...)")
        return self._app

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], app: "SendingApp | None" = None) -> "Signature[Any]":
        """The signature whose map this is, of whatever kind."""
        return signature_from(data, app)

    def set(self, immutable: bool | None = None, **options: Unpack[SendOptions]) -> "Signature[R]":
        """Add sending options; returns itself, so calls can be strung together."""
        if immutable is not None:
            self.set_immutable(immutable)
        check_options(options)
        self.options.update(options)
        return self

    def set_immutable(self, immutable: bool) -> None:
        self.immutable = immutable

    def clone(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> "Signature[R]":
        """A separate copy, with these arguments put first and these options on top."""
        if options:
            check_options(options)
        copy: Signature[R] = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.args = _copied(self.args, self.args)
        copy.kwargs = _copied(self.kwargs, self.kwargs.values()) if self.kwargs else {}
        own = cast(dict[str, Any], self.options)
        copy.options = cast(SendOptions, _copied(own, own.values())) if own else {}
        # What is given now is not copied: the result of a chain's step may be large.
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
        """Give its messages these headers, by which they can be found and revoked; returns itself.

        `visitor` adds what it says of each signature. A stamp that is there already is replaced, or with
        `append_stamps` joined with the new one in a list.
        """
        stamp_signature(self, visitor, append_stamps, stamps)
        return self

    def stamped(self, options: Mapping[str, Any]) -> None:
        self.set(**cast(SendOptions, options))

    def linked(self, name: str) -> "list[Stamped]":
        """Its callbacks (`link`) or errbacks (`link_error`), as signatures."""
        whole = cast(dict[str, Any], self.options)
        if name not in whole:
            return []
        found = [signature_from(one, self._app) for one in listed(whole[name])]
        whole[name] = found
        return list(found)

    def __or__(self, other: "Signature[Any]") -> "Signature[Any]":
        if not isinstance(other, Signature):
            return NotImplemented
        return _combined(self, other)

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[R]:
        return self.apply_async(args, kwargs)

    def apply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """Send it; further arguments go first, further options on top."""
        call = self.clone(args, kwargs, **options)
        if call.is_unique:
            return send_unique(self.app, call.task, call.args, call.kwargs, call.options)
        call.freeze()
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
        app, call = self.app, self.clone(args, kwargs, **options)
        if call.is_unique:
            return await app.asend_unique(call.task, call.args, call.kwargs, call.options)
        call.freeze()
        sender, ends = current_request(), app.send_ends()
        await app.apublish(await app.aprepare(lambda: call.prepare(sender=sender), ends), ends)
        result: AsyncResult[R] = call.handle()
        return result

    @property
    def is_unique(self) -> bool:
        """Whether it is not sent while another one like it waits or runs."""
        known = self.app.tasks.get(self.task)
        return type(self) is Signature and is_unique(known.options if known else None, self.options)

    def election(
        self, *, policy: str | None = None, expires: float | None = None, timeout: float = 0.0
    ) -> AsyncResult[R]:
        """Have one worker send it, once, under one task id; the election has the same id."""
        call = self.clone()
        task_id = call.freeze()
        self.app.control.election(
            task_id, "task", call.to_map(), policy=policy, expires=expires, timeout=timeout
        )
        result: AsyncResult[R] = call.handle()
        return result

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """The messages that sending it takes."""
        return [self.prepare_as("", sender=sender)]

    def prepare_as(self, task_id: str, *, sender: Request | None = None) -> Prepared:
        """The message of this one call, under that id if its options name none."""
        app = self.app
        known = app.find_task(self.task)
        if known is not None:
            known.check_arguments(self.args, self.kwargs)
        return app.prepare(self.task, self.args, self.kwargs, self.options, sender=sender, task_id=task_id)

    def handle(self, parent: Any = None) -> Any:
        """The result of a signature that has its id."""
        ignored = self.app.ignores_result(self.task, self.options)
        known = self.app.find_task(self.task)
        types = self.result_types or (known.options.types if known else None)
        return AsyncResult(self.options["task_id"], app=self.app, parent=parent, ignored=ignored, types=types)

    def absorb(self, following: "Signature[Any]") -> "Signature[Any] | None":
        """The one signature that this and what follows it in a chain become, if they do."""
        return None

    def as_steps(self) -> "list[Signature[Any]]":
        """The steps that it brings into a chain."""
        return [self]

    def join_group(self, group_id: str, place: int | None) -> None:
        """Be a member of a group: the task whose result counts is marked with it."""
        self.options["group_id"] = group_id
        if place is not None:
            self.options["group_index"] = place

    @property
    def is_member(self) -> bool:
        """Whether the task whose result counts belongs to a group."""
        return "group_id" in self.options

    def join_chord(self, body: SignatureMap) -> None:
        """Be a part of a chord: the task whose result counts carries the body."""
        self.options["chord"] = body

    def parts(self) -> int:
        """How many results a chord gets of it, once it has joined one."""
        return 1

    def apply(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> AsyncResult[R]:
        """Run it here, through the path a worker would take."""
        with self.app.eager():
            return self.apply_async(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the task's function here and now."""
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
        options = dict(self.options)
        for name in ("link", "link_error"):
            if name in options:
                options[name] = [_as_map(one) for one in listed(options[name])]
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
        """Without its app: pickled, it is what a message carries."""
        return Signature.from_dict, (self.to_map(),)

    def __copy__(self) -> "Signature[R]":
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Signature[R]":
        return self.clone()  # not of the app

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.to_map() == other.to_map()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        args, kwargs = self._shown()
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{self.task}({', '.join(given)})"

    def _shown(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Without sensitive arguments. Where a chain may put a result first, their places are not known."""
        task = None if self._app is None else self._app.find_task(self.task)
        if task is None or (hides := task.options.hides) is None:
            return self.args, self.kwargs
        args, kwargs = hides.hide(self.args, self.kwargs)
        return args if self.immutable else [HIDDEN] * len(args), kwargs


Maker = Callable[[SignatureMap, "SendingApp | None"], Signature[Any]]
Combiner = Callable[[Signature[Any], Signature[Any]], Signature[Any]]
_MAKERS: dict[str, Maker] = {}
_COMBINERS: list[Combiner] = []


def register_kind(subtask_type: str, task: str, maker: Maker) -> None:
    """Have signatures of this kind, as they travel in messages, made by `maker`."""
    _MAKERS[subtask_type] = _MAKERS[task] = maker


def register_combiner(combiner: Combiner) -> None:
    """Have this make one signature of two that are joined by `|`."""
    _COMBINERS[:] = [combiner]


def _combined(first: Signature[Any], second: Signature[Any]) -> Signature[Any]:
    return _COMBINERS[0](first, second)


def signature_from(value: object, app: "SendingApp | None") -> Signature[Any]:
    """The signature that came as a map from a message or from a user."""
    if isinstance(value, Signature):
        if value._app is None and app is not None:
            value = value.clone()
            value._app = app
        return value
    data = check_signature(value)
    data["options"] = known_options(data["options"])
    maker = _MAKERS.get(data["subtask_type"] or data["task"])
    if maker is not None:
        return maker(data, app)
    options = cast(SendOptions, data["options"])
    return Signature(
        data["task"], data["args"], data["kwargs"], options, immutable=data["immutable"], app=app
    )


def _copied(values: C, items: Iterable[Any]) -> C:
    """A separate list or map: `deepcopy` is needed only for items that can change."""
    return values.copy() if _UNCHANGING.issuperset(map(type, items)) else deepcopy(values)


def with_one_more(linked: Any, signature: Signature[Any]) -> list[Any]:
    """The callbacks with this one; one that is there already is not called twice."""
    known = listed(linked)
    return known if any(one == signature for one in known) else [*known, signature]


def listed(value: Any) -> list[Any]:
    if not value:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_map(value: Any) -> SignatureMap:
    return value.to_map() if isinstance(value, Signature) else check_signature(value)
