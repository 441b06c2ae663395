"""Chain: calls that run one after another, each with the result of the one before.

A chain is sent as the message of its first step, which contains the other steps. A step behind a group waits
for all members of the group: the two become a chord (`group.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from umbel.app.canvas.signature import (
    Signature,
    StampingVisitor,
    signature_from,
    stamp_parts,
)
from umbel.app.options import SendOptions
from umbel.app.request import Request
from umbel.app.sending.preparation import Prepared
from umbel.wire.steps import SignatureMap

if TYPE_CHECKING:
    from umbel.app.app import App

CHAIN_TASK = "celery.chain"
# Options of a chain that are not for its first step.
_OF_THE_CHAIN = frozenset({"task_id", "chain", "chord", "link", "link_error"})


class Chain(Signature[Any]):
    """Calls that run one after another, each with the result of the one before.

    An empty chain sends nothing. A chain of empty groups sends nothing either, and has the result of the
    first.
    """

    subtask_type = "chain"

    def __init__(
        self,
        *steps: Signature[Any] | Iterable[Signature[Any]],
        app: "App | None" = None,
        options: SendOptions | None = None,
        immutable: bool = False,
    ) -> None:
        given = list(_given(steps))
        known = app or next((step._app for step in given if step._app is not None), None)
        super().__init__(CHAIN_TASK, options=options, app=known, immutable=immutable)
        self.steps = _joined(step for call in given for step in call.as_steps()) or _nothing_of(given)

    @property
    def tasks(self) -> list[Signature[Any]]:
        """The steps, under Celery's name."""
        return self.steps

    def clone(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> "Chain":
        """A copy; the arguments go to the first step."""
        if self.immutable:
            args, kwargs = (), None
        whole = cast(SendOptions, {**self.options, **options})
        copy = Chain(app=self._app, options=whole, immutable=self.immutable)
        copy.steps = [
            step.clone(args, kwargs) if place == 0 else step.clone() for place, step in enumerate(self.steps)
        ]
        return copy

    def apply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> Any:
        """Send it; the result is that of the last step. None: it has no steps, and nothing is sent."""
        return super().apply_async(args, kwargs, **options) if self.steps else None

    async def aapply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> Any:
        """The same as `apply_async`, without blocking the event loop."""
        return await super().aapply_async(args, kwargs, **options) if self.steps else None

    def freeze(self, task_id: str | None = None) -> str:
        """Fix the ids of all steps; return that of the last, "" without steps."""
        if not self.steps:
            return ""
        for step in self.steps[:-1]:
            step.freeze()
        return self.steps[-1].freeze(task_id or self.options.get("task_id"))

    def prepare(self, *, sender: Request | None = None) -> list[Prepared]:
        """Make the message of the first step, which contains the others."""
        if not self.steps:
            return []
        self.freeze()
        return self.first_step().prepare(sender=sender)

    def first_step(self) -> Signature[Any]:
        """The first step, which carries the others, the next step last."""
        first, *rest = steps_of(self)
        behind = self.options.get("chain") or []  # if the chain itself is a step of a chain
        first.options["chain"] = [*behind, *(step.to_map() for step in reversed(rest))]
        return first

    def handle(self, parent: Any = None) -> Any:
        """The result handle of the last step; its `parent` is the step before. None without steps."""
        for step in self.steps:
            parent = step.handle(parent)
        return parent

    def join_group(self, group_id: str, place: int | None) -> None:
        """Make its last step a member of the group."""
        self.steps[-1].join_group(group_id, place)

    @property
    def is_member(self) -> bool:
        """Whether its last step belongs to a group."""
        return self.steps[-1].is_member

    def join_chord(self, body: SignatureMap) -> None:
        """Make its last step a part of the chord."""
        self.steps[-1].join_chord(body)

    def parts(self) -> int:
        """How many results a chord gets from its last step."""
        return self.steps[-1].parts()

    @property
    def sends_nothing(self) -> bool:
        """Whether none of its steps contains a call."""
        return all(step.sends_nothing for step in self.steps)

    def as_steps(self) -> list[Signature[Any]]:
        """Its steps, with the options of the chain; none if it sends nothing."""
        return [] if self.sends_nothing else steps_of(self)

    def absorb(self, following: Signature[Any]) -> Signature[Any] | None:
        """A successor of an empty group is given an empty list, as in Celery."""
        return self.steps[0].absorb(following) if self.steps and self.sends_nothing else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Send it."""
        return self.apply_async(args, kwargs)

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> "Chain":
        """Stamp all its steps."""
        stamp_parts(self, self.steps, visitor, append_stamps, stamps, "chain")
        return self

    def to_map(self) -> SignatureMap:
        """The map of Celery's protocol, with the steps in `tasks`."""
        whole = super().to_map()
        whole["kwargs"] = {"tasks": [step.to_map() for step in self.steps]}
        return whole

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.steps))

    @classmethod
    def combined(cls, first: Signature[Any], second: Signature[Any]) -> "Chain":
        """The chain of `first | second`. Unlike in a longer chain, a group of one member stays a group: its
        successor is given a list.
        """
        following = second.as_steps()
        whole = first.absorb(following[0]) if following else None
        return Chain(first, second) if whole is None else Chain(whole, *following[1:])

    @classmethod
    def _from_map(cls, data: SignatureMap, app: "App | None") -> "Chain":
        steps = [signature_from(step, app) for step in data["kwargs"].get("tasks", ())]
        options = cast(SendOptions, data["options"])
        return Chain(*steps, app=app, options=options, immutable=data["immutable"])


def chain(*steps: Signature[Any] | Iterable[Signature[Any]]) -> Chain:
    """Calls that run one after another, each with the result of the one before."""
    return Chain(*steps)


def steps_of(signature: Chain) -> list[Signature[Any]]:
    """The steps of a chain, with the options of the chain.

    As in Celery, a callback of a chain follows its last step, an errback may follow any step, and the other
    options are for the first step.
    """
    if not signature.options or not signature.steps:
        return signature.steps
    whole = signature.clone()
    steps, options = whole.steps, whole.options
    callbacks, errbacks = whole.take_links()
    for step in steps:
        for errback in errbacks:
            step.link_error(errback)
    for callback in callbacks:
        steps[-1].link(callback)
    shared = {name: value for name, value in options.items() if name not in _OF_THE_CHAIN}
    steps[0].options = cast(SendOptions, {**shared, **steps[0].options})
    if "task_id" in options:
        steps[-1].freeze(options["task_id"])
    return steps


def _given(steps: Iterable[Signature[Any] | Iterable[Signature[Any]]]) -> Iterator[Signature[Any]]:
    """The steps, also of lists and generators of steps."""
    for item in steps:
        if isinstance(item, Signature):
            yield item
        else:
            yield from item


def _nothing_of(given: Sequence[Signature[Any]]) -> list[Signature[Any]]:
    """For a chain without steps, the first empty group: the chain has its result."""
    found = (
        step
        for signature in given
        for step in (signature.steps if isinstance(signature, Chain) else [signature])
    )
    return next(([signature] for signature in found), [])


def _joined(steps: Iterable[Signature[Any]]) -> list[Signature[Any]]:
    """The steps of a chain. A group and its successor become one chord."""
    joined: list[Signature[Any]] = []
    for step in steps:
        merged_step = joined[-1].absorb(step) if joined else None
        if merged_step is None:
            joined.append(step)
        else:
            joined[-1] = merged_step
    return joined
