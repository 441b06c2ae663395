"""Pausing, resuming and emptying queues into others, for who asks: commands, `app.control`, the dashboard.

Nodes of ours look at the mark in the broker whenever they claim. Celery's do not: those that consume the
queue are told to stop (`cancel_consumer`) and, with the resume, to go on (`add_consumer`). The mark names
them from before the one until after the other, so that nobody who obeys late, or was told by somebody who
was interrupted then, rests for ever. A Celery worker that starts while the queue is paused consumes it:
pausing again tells it.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from umbel.brokers.interface import PAUSED_MAX, Pause, QueueControl, Queues
from umbel.clock import cluster_now
from umbel.control.client import Asker
from umbel.control.commands.queues import queue_name_problem
from umbel.errors import BrokerRefused, ConfigurationError
from umbel.protocol.pidbox import Answers


class QueueBroker(Queues, QueueControl, Protocol):
    """What is asked here of a broker."""


class PauseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`changed`: it was not so before. `told`: nodes that do not look at the mark, and obeyed when told.

    `silent`: nodes that should have answered and did not; one that looks at the mark obeys all the same.
    `refused`: what nodes answered that did not obey. `ask_again`: the command that tells both again.
    """

    queue: str
    paused: bool
    changed: bool
    told: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    ask_again: str = ""


async def pause_queue(broker: QueueBroker, asker: Asker, queue: str, *, timeout_s: float) -> PauseOutcome:
    """No worker takes from the queue until it is resumed; what it has taken ends as ever."""
    _check_names(queue)
    known = await broker.paused()
    before = known.get(queue)
    if before is None and len(known) >= PAUSED_MAX:
        raise ConfigurationError(f"{PAUSED_MAX:,} queues are paused, which is the limit; resume some first")
    mark = before or Pause(cluster_now())
    await broker.pause(queue, mark)
    seen = await asker.ask("active_queues", timeout_s=timeout_s)
    heedless = [node for node, reply in seen.replies.items() if _consumes_anyway(reply, queue)]
    if {*heedless} - {*mark.told}:
        await broker.pause(queue, _with_told(mark, {*mark.told, *heedless}))
    stopped = await _tell(asker, "cancel_consumer", queue, heedless, timeout_s)
    told = [node for node in heedless if node not in _unanswered(stopped)]
    if refused := _refusals(stopped).keys() - {*mark.told}:  # they consume, and need not be told to go on
        await broker.pause(queue, _with_told(mark, {*mark.told, *heedless} - refused))
    again = shlex.join(("umbel", "queues", "pause", queue))
    return _outcome(queue, before is None, told, (seen, stopped), paused=True, again=again)


async def resume_queue(broker: QueueBroker, asker: Asker, queue: str, *, timeout_s: float) -> PauseOutcome:
    """Workers take from the queue again, and those that were told to stop are told to go on."""
    _check_names(queue)
    mark = (await broker.paused()).get(queue)
    told = [] if mark is None else list(mark.told)
    answers = await _tell(asker, "add_consumer", queue, told, timeout_s)
    was_paused = await broker.resume(queue)  # last: who is interrupted before can do it all again
    left = sorted(_unanswered(answers))
    obeyed = [node for node in told if node not in left]
    again = shlex.join(("umbel", "control", "add_consumer", queue, "-d", ",".join(left)))
    return _outcome(queue, was_paused, obeyed, (answers,), paused=False, again=again)


async def waiting_in(broker: Queues, queue: str) -> int:
    """How many messages wait in it, due or not."""
    depth = (await broker.queues()).get(queue)
    return depth.ready + depth.delayed if depth else 0


async def move_messages(
    broker: QueueBroker,
    source: str,
    target: str,
    *,
    limit: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _moved, _of: None,
) -> int:
    """Move what waits now, due or not, or `limit` of it, in portions; how many were.

    What arrives meanwhile is not counted, so this ends however fast messages are sent.
    """
    _check_names(source, target)
    if source == target:
        raise ConfigurationError(f"cannot move messages from {source!r} to itself; name another queue")
    waiting = await waiting_in(broker, source)
    wanted = waiting if limit is None else min(limit, waiting)
    moved = 0
    try:
        while moved < wanted and (portion := await broker.move(source, target, wanted - moved)):
            moved += portion
            on_progress(moved, wanted)
    except BrokerRefused as refused:
        if not moved:
            raise
        raise BrokerRefused(f"moving stopped after {moved} messages were moved: {refused}") from None
    return moved


def _check_names(*queues: str) -> None:
    for queue in queues:
        if problem := queue_name_problem(queue):
            raise ConfigurationError(f"{problem}, not {queue[:50]!r}")


def _with_told(mark: Pause, told: Iterable[str]) -> Pause:
    return Pause(mark.since, tuple(sorted(told)))


def _consumes_anyway(reply: Any, queue: str) -> bool:
    """Whether the node consumes the queue and does not say that it is paused."""
    maps = [one for one in reply if isinstance(one, dict)] if isinstance(reply, list) else []
    return any(one.get("name") == queue and not one.get("paused") for one in maps)


async def _tell(asker: Asker, command: str, queue: str, nodes: Sequence[str], timeout_s: float) -> Answers:
    if not nodes:
        return Answers({})
    return await asker.ask(command, {"queue": queue}, destination=nodes, timeout_s=timeout_s)


def _unanswered(answers: Answers) -> set[str]:
    return {one.node for one in answers.silent} | _refusals(answers).keys()


def _refusals(answers: Answers) -> dict[str, str]:
    return {
        node: str(reply["error"])
        for node, reply in answers.replies.items()
        if isinstance(reply, dict) and "error" in reply
    }


def _outcome(
    queue: str, changed: bool, told: Sequence[str], asked: Sequence[Answers], *, paused: bool, again: str
) -> PauseOutcome:
    silent = {one.node for answers in asked for one in answers.silent}
    refused = {node: why for answers in asked for node, why in _refusals(answers).items()}
    return PauseOutcome(
        queue=queue,
        paused=paused,
        changed=changed,
        told=tuple(sorted(told)),
        silent=tuple(sorted(silent)),
        refused=refused,
        ask_again=again if silent or refused else "",
    )
