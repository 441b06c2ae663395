"""Pausing, resuming and emptying queues into others, for the commands, `app.control` and the dashboard.

Umbel's workers read the pause at the broker whenever they claim. Celery's workers do not: those that consume
the queue are sent `cancel_consumer` and, at the resume, `add_consumer`. The pause at the broker names them
from before the first command until after the second, so a worker that obeys late, or whose pause was
interrupted half-way, does not stay idle for ever. A Celery worker that starts while the queue is paused
consumes it; pausing again stops it.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from umbel.brokers.interface import PAUSED_MAX, Broker, Pause, Queues
from umbel.clock import cluster_now
from umbel.control.client import ControlClient
from umbel.control.commands import queue_name_problem
from umbel.errors import BrokerRefused, ConfigurationError
from umbel.protocol.pidbox import Answers


class PauseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`changed`: false if the queue was paused, or resumed, already.

    `told`: nodes that do not read the pause at the broker, and obeyed a command instead.
    `silent`: nodes that should have answered and did not; Umbel's obey the pause all the same. `refused`: the
    replies of nodes that did not obey. `ask_again`: the command that sends it to both again.
    """

    queue: str
    paused: bool
    changed: bool
    told: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    ask_again: str = ""


async def pause_queue(
    broker: Broker, asker: ControlClient, queue: str, *, timeout_s: float | None
) -> PauseOutcome:
    """Pause the queue: no worker claims from it until it is resumed; running tasks go on."""
    _check_names(queue)
    known = await broker.paused()
    before = known.get(queue)
    if before is None and len(known) >= PAUSED_MAX:
        raise ConfigurationError(f"{PAUSED_MAX:,} queues are paused, which is the limit; resume some first")
    pause = before or Pause(cluster_now())
    await broker.pause(queue, pause)
    seen = await asker.ask("active_queues", timeout_s=timeout_s)
    heedless = [node for node, reply in seen.replies.items() if _consumes_anyway(reply, queue)]
    if {*heedless} - {*pause.told}:
        await broker.pause(queue, _with_told(pause, {*pause.told, *heedless}))
    stopped = await _tell(asker, "cancel_consumer", queue, heedless, timeout_s)
    obeyed = [node for node in heedless if node not in _unanswered(stopped)]
    if refused := stopped.refusals.keys() - {*pause.told}:  # they still consume: a resume need not name them
        await broker.pause(queue, _with_told(pause, {*pause.told, *heedless} - refused))
    again = shlex.join(("umbel", "queues", "pause", queue))
    return _outcome(queue, before is None, obeyed, (seen, stopped), paused=True, again=again)


async def resume_queue(
    broker: Broker, asker: ControlClient, queue: str, *, timeout_s: float | None
) -> PauseOutcome:
    """Resume the queue, and send `add_consumer` to the nodes that were sent `cancel_consumer`."""
    _check_names(queue)
    pause = (await broker.paused()).get(queue)
    stopped = [] if pause is None else list(pause.told)
    answers = await _tell(asker, "add_consumer", queue, stopped, timeout_s)
    was_paused = await broker.resume(queue)  # last: an interrupted resume can be repeated
    left = sorted(_unanswered(answers))
    obeyed = [node for node in stopped if node not in left]
    again = shlex.join(("umbel", "control", "add_consumer", queue, "-d", ",".join(left)))
    return _outcome(queue, was_paused, obeyed, (answers,), paused=False, again=again)


async def count_waiting(broker: Queues, queue: str) -> int:
    """Return how many messages wait in the queue, due or not."""
    depth = (await broker.queues()).get(queue)
    return depth.ready + depth.delayed if depth else 0


async def move_messages(
    broker: Broker,
    source: str,
    target: str,
    *,
    limit: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _moved, _of: None,
) -> int:
    """Move the messages that wait now, due or not, at most `limit`, in portions; return how many were moved.

    Messages that arrive meanwhile are not counted, so this ends however fast messages are sent.
    """
    _check_names(source, target)
    if source == target:
        raise ConfigurationError(f"cannot move messages from {source!r} to itself; name another queue")
    waiting = await count_waiting(broker, source)
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


def _with_told(pause: Pause, nodes: Iterable[str]) -> Pause:
    return Pause(pause.since, tuple(sorted(nodes)))


def _consumes_anyway(reply: Any, queue: str) -> bool:
    """Return whether the node consumes the queue and does not report it as paused."""
    from umbel.wire.control import QueueRow, rows  # workers do not need to load it

    return any(row.name == queue and not row.paused for row in rows(reply, QueueRow))


async def _tell(
    asker: ControlClient, command: str, queue: str, nodes: Sequence[str], timeout_s: float | None
) -> Answers:
    if not nodes:
        return Answers({})
    return await asker.ask(command, {"queue": queue}, destination=nodes, timeout_s=timeout_s)


def _unanswered(answers: Answers) -> set[str]:
    return {known.node for known in answers.silent} | answers.refusals.keys()


def _outcome(
    queue: str, changed: bool, obeyed: Sequence[str], asked: Sequence[Answers], *, paused: bool, again: str
) -> PauseOutcome:
    """Return the outcome, with the command to repeat if nodes were silent or refused."""
    silent = {known.node for answers in asked for known in answers.silent}
    refused = {node: why for answers in asked for node, why in answers.refusals.items()}
    return PauseOutcome(
        queue=queue,
        paused=paused,
        changed=changed,
        told=tuple(sorted(obeyed)),
        silent=tuple(sorted(silent)),
        refused=refused,
        ask_again=again if silent or refused else "",
    )
