"""Performer: an action is carried out: by the workers, by the broker, in the dashboard's file, or by sending
a task.

Nothing here asks who may; `Dashboard.act` has checked that and written the audit entry. What the workers do
not allow (`control_allow`) they refuse, and the refusal is in the reply. A task can be sent again where its
events carry its arguments whole, as literals, with nothing masked; otherwise the refusal says why.
"""

import ast
import asyncio
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sqlite3 import Error as FileError
from time import time
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from umbel.app.app import App
from umbel.brokers.interface import Broker, DeadLetter
from umbel.control.client import ControlClient
from umbel.control.failures import FailureFilter, RetryOutcome, find_failed, retry_failed
from umbel.control.queue_pauses import PauseOutcome, move_messages, pause_queue, resume_queue
from umbel.errors import UmbelError
from umbel.events.view import TaskRecord
from umbel.launch.timetable import change_pauses
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.records import TaskFilter, letter_row
from umbel.protocol.delivery.sensitive import MASK
from umbel.protocol.delivery.states import FAILURE
from umbel.protocol.pidbox import Answers
from umbel.web.action_events import MARK, EventPublisher
from umbel.web.actions import (
    IDS_MAX,
    VIEW_BYTES_MAX,
    VIEWS_MAX,
    AddQueue,
    AnyAction,
    Autoscale,
    CancelQueue,
    DeleteView,
    DropDead,
    EndSessions,
    Grow,
    MarkMoment,
    MoveMessages,
    OnTasks,
    PausePeriodic,
    PauseQueue,
    Purge,
    RateLimit,
    RequeueDead,
    RestartPool,
    ResumePeriodic,
    ResumeQueue,
    Retry,
    Revoke,
    RunPeriodic,
    SavedView,
    SaveView,
    Shrink,
    StartElection,
    Stop,
    Terminate,
    TimeLimit,
)
from umbel.web.problems import Refused
from umbel.wire.retried import RETRY_OF

# ---- what the dashboard does to whole queues -------------------------------------------------------
#
# Pause, resume, move; each as fields of an `ActionResult`.

QueueAction = PauseQueue | ResumeQueue | MoveMessages


async def change_queue(broker: Broker, action: QueueAction) -> dict[str, Any]:
    """Pause, resume or move a queue; return the fields of the result."""
    try:
        match action:
            case PauseQueue(queue=queue):
                return _pause_outcome(await pause_queue(broker, ControlClient(broker), queue, timeout_s=None))
            case ResumeQueue(queue=queue):
                return _pause_outcome(
                    await resume_queue(broker, ControlClient(broker), queue, timeout_s=None)
                )
            case MoveMessages():
                moved = move_messages(broker, action.queue, action.target, limit=action.limit)
                return {"count": await moved}
    except UmbelError as error:
        return {"problem": str(error)}


def _pause_outcome(outcome: PauseOutcome) -> dict[str, Any]:
    """Return the result for one queue, with the replies of the nodes that consume it."""
    reply = "no longer consuming" if outcome.paused else "consuming again"
    return {
        "count": 1,
        "replies": {node: {"ok": f"{reply} {outcome.queue}"} for node in outcome.told},
        "silent": list(outcome.silent),
        "refused": dict(outcome.refused),
    }


# ---- view actions ----------------------------------------------------------------------------------
#
# What the dashboard does to its saved views: save and delete, as fields of an `ActionResult`.

ViewAction = SaveView | DeleteView


class ViewStore(Protocol):
    """The file that stores saved views."""

    def save_view(self, view: SavedView) -> bool:
        """Save a view; return False if there are too many."""

    def delete_view(self, name: str) -> bool:
        """Delete a view; return whether it existed."""


def check_view(action: ViewAction) -> None:
    """Raise Refused for a view with a bad name or of too many bytes."""
    if action.nodes:
        raise Refused(
            422, "Unprocessable", "saved views are stored by the dashboard, not by workers; leave out `nodes`"
        )
    if not action.view.strip() or not action.view.isprintable():
        raise Refused(422, "Unprocessable", "a view needs a name of letters, digits, signs and plain spaces")
    size = len(msgspec.json.encode(action))
    if size > VIEW_BYTES_MAX:
        detail = f"the view has {size:,} bytes, of {VIEW_BYTES_MAX:,} at most; shorten what it searches for"
        raise Refused(422, "Unprocessable", detail)


async def change_views(store: ViewStore, action: ViewAction) -> dict[str, Any]:
    """Save or delete a view; return the fields of the result."""
    try:
        if isinstance(action, SaveView):
            return await asyncio.to_thread(_save, store, action)
        return await asyncio.to_thread(_delete, store, action.view)
    except FileError as error:
        return {"problem": f"the dashboard's file cannot be written: {error}"}


def _save(store: ViewStore, action: SaveView) -> dict[str, Any]:
    view = SavedView(
        name=action.view,
        match=action.match,
        order=action.order,
        columns=list(dict.fromkeys(action.columns)),
        saved_at=time(),
    )
    if store.save_view(view):
        return {"count": 1}
    return {"problem": f"there are {VIEWS_MAX} saved views already; delete some first"}


def _delete(store: ViewStore, name: str) -> dict[str, Any]:
    if store.delete_view(name):
        return {"count": 1}
    return {"refused": {name: "there is no such view"}}


# ---- resending -------------------------------------------------------------------------------------
#
# Whether a task can be sent again from what its events say, and with which arguments.
#
# Events carry arguments as text. Where the text is whole, is a literal, and nothing in it was masked, it is
# the arguments; anything else is refused by name, because a task that runs with half its arguments is worse
# than one that does not run.
#
# Anyone who can write to the broker can send an event. So where there are keys nothing is sent from events,
# which would sign what they say: then only retained messages are sent again, which were verified.

UNSURE = ("...", "…", MASK)
TEXT_MAX = 65_536
ONLY_RETAINED = (
    "its message is not retained, and where 'signing_keys' are set nothing else is sent again: "
    "events are not signed; send it with your own code or `umbel call`"
)


class ResendableCall(msgspec.Struct, frozen=True):
    """A call that can be sent again: the task's name, arguments and queue."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str | None


def call_of(task: TaskRecord) -> ResendableCall | str:
    """Return the call to send, or why it cannot be known.

    Events carry arguments as text. The text is used if it is complete, a literal, and nothing in it was
    masked: a task that runs with half its arguments is worse than one that does not run.
    """
    if not task.name:
        return "its name is unknown: no event of its sending or receipt was received"
    args, kwargs = _literal(task.args or "()"), _literal(task.kwargs or "{}")
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        return "its arguments are incomplete: they were cut, masked, or are not plain data"
    return ResendableCall(task.name, list(args), kwargs, task.queue)


def as_command(call: ResendableCall) -> str:
    """Return the `umbel call` command that sends it again; "" if the arguments are not JSON."""
    words = ["umbel", "call", call.name]
    try:
        words += ["--args", json.dumps(call.args)] if call.args else []
        words += ["--kwargs", json.dumps(call.kwargs)] if call.kwargs else []
    except (TypeError, ValueError):
        return ""
    return shlex.join(words + (["-q", call.queue] if call.queue else []))


def _literal(text: str) -> Any:
    if len(text) > TEXT_MAX or any(sign in text for sign in UNSURE):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


# ---- performing ------------------------------------------------------------------------------------
#
# An action is carried out: by the workers, by the broker, or by sending a task.
#
# Nothing here asks who may; `Dashboard.act` has done so and written it down. What the workers do not allow
# (`control_allow`) they refuse, and their refusal is in the replies.

LETTERS_MAX = 100_000
SEND_AT_ONCE = 50
Outcome = dict[str, Any]  # fields of ActionResult
Resending = tuple[str, ResendableCall, Any]  # the task that is sent again, and how


class Performer:
    """Carries out actions that were allowed and audited."""

    def __init__(
        self,
        app: App,
        broker: Broker,
        cluster: KnownCluster,
        teller: EventPublisher,
        views: ViewStore,
        end_sessions: Callable[[str], int],
    ) -> None:
        self._app, self._broker, self._cluster, self._teller = app, broker, cluster, teller
        self._views, self._end_sessions = views, end_sessions

    def check(self, action: AnyAction) -> AnyAction:
        """Return the action with its tasks listed by id; Refused for one that cannot be carried out."""
        if isinstance(action, OnTasks):
            named: AnyAction = self._named(action)
            return named
        if isinstance(action, Stop) and not action.nodes:
            raise Refused(422, "Unprocessable", "name the nodes to stop in `nodes`")
        if isinstance(action, RequeueDead | DropDead) and action.every == bool(action.letters):
            raise Refused(422, "Unprocessable", "give exactly one of `letters` and `every`")
        if isinstance(action, PauseQueue | ResumeQueue | MoveMessages) and action.nodes:
            raise Refused(422, "Unprocessable", "queues belong to the whole cluster; leave out `nodes`")
        if isinstance(action, EndSessions) and action.nodes:
            raise Refused(422, "Unprocessable", "sessions are those of this dashboard; leave out `nodes`")
        if isinstance(action, SaveView | DeleteView):
            check_view(action)
        if isinstance(action, RunPeriodic | PausePeriodic | ResumePeriodic):
            self._periodic(action.name)
        return action

    async def perform(self, action: AnyAction) -> Outcome:
        """Carry out an action; return the fields of its result."""
        match action:
            case Revoke() | Terminate():
                return await self._revoke(action)
            case Retry():
                return await self._retry(action.ids)
            case Purge():
                return {"count": await self._broker.purge(action.queue)}
            case PauseQueue() | ResumeQueue() | MoveMessages():
                return await change_queue(self._broker, action)
            case RequeueDead() | DropDead():
                return await self._letters(action)
            case Stop():
                await self._cluster.feed.tell("shutdown", {}, nodes=action.nodes)
                return {"count": len(action.nodes)}
            case RunPeriodic():
                return await self._run_now(action.name)
            case PausePeriodic():
                return await self._change_pauses(lambda paused: paused | {action.name})
            case ResumePeriodic():
                return await self._change_pauses(lambda paused: paused - {action.name})
            case MarkMoment():
                await self._teller.tell(MARK, {"text": action.text})
                return {"count": 1}
            case StartElection():
                return await self._elect(action)
            case EndSessions():
                return {"count": self._end_sessions(action.name)}
            case SaveView() | DeleteView():
                return await change_views(self._views, action)
            case _:
                command, arguments = _command(action)
                asked = self._cluster.feed.ask(command, arguments, nodes=action.nodes)
                return _answered(await asked)

    # -- tasks -----------------------------------------------------------------------------------

    def _named(self, action: OnTasks) -> Any:
        if action.nodes:
            raise Refused(422, "Unprocessable", "tasks are looked for on all nodes; leave out `nodes`")
        if bool(action.ids) == (action.match is not None):
            raise Refused(422, "Unprocessable", "give exactly one of `ids` and `match`, to choose the tasks")
        if action.match is None:
            return action
        if action.match == TaskFilter():
            raise Refused(422, "Unprocessable", "an empty filter matches every task; narrow it")
        found = self._cluster.ids(action.match, IDS_MAX)
        if len(found) > IDS_MAX:
            raise Refused(422, "Unprocessable", f"more than {IDS_MAX:,} tasks match; narrow the filter")
        if action.expected is not None and len(found) > action.expected:
            detail = f"{len(found)} tasks match now, not {action.expected}; reload the page and try again"
            raise Refused(409, "Conflict", detail)
        return msgspec.structs.replace(action, ids=found, match=None, expected=None)

    async def _revoke(self, action: Revoke | Terminate) -> Outcome:
        ends = isinstance(action, Terminate)
        signal = action.signal if isinstance(action, Terminate) else ""
        answers = self._cluster.feed.revoke(action.ids, terminate=ends, signal=signal)
        return _answered(await answers, len(action.ids))

    async def _retry(self, ids: Sequence[str]) -> Outcome:
        """Send tasks again: from the retained message of a failure, else from the call that its events
        describe.

        Events are not signed, so if there are signing keys only retained messages are sent: a forged event
        would be signed. A failure without a retained message that was retried already is refused. The model
        is read here, on the event loop that changes it; only sending is done in a thread.
        """
        retained = await self._retry_kept(ids)
        refused = retained.refused | dict.fromkeys(retained.gone, "it was retried by someone else just now")
        sent = dict(retained.sent)
        for old, new in retained.sent.items():
            self._cluster.model.note_retry(old, new)
        others = [
            task_uuid
            for task_uuid in dict.fromkeys(ids)
            if task_uuid not in sent and task_uuid not in refused
        ]
        if self._app.settings.keyring is not None:
            refused |= dict.fromkeys(others, ONLY_RETAINED)
            others = []
        for start in range(0, len(others), SEND_AT_ONCE):
            calls = [self._call(task_uuid, refused) for task_uuid in others[start : start + SEND_AT_ONCE]]
            ready = [call for call in calls if call is not None]
            await asyncio.to_thread(self._send, ready, sent, refused)
            for task_id, _call, _options in ready:
                if task_id in refused:
                    self._cluster.model.forget_retry(task_id)
        in_order = [sent[task_uuid] for task_uuid in dict.fromkeys(ids) if task_uuid in sent]
        return {"count": len(sent), "sent": in_order, "refused": refused}

    async def _retry_kept(self, ids: Sequence[str]) -> RetryOutcome:
        found = await find_failed(self._broker, FailureFilter(ids=frozenset(ids)))
        accept = self._app.settings.accept_content
        return await retry_failed(self._broker, found, accept=accept, only_verified=True)

    def _call(self, task_id: str, refused: dict[str, str]) -> Resending | None:
        task = self._cluster.model.state.task(task_id)
        call = (
            "it is not in the dashboard's memory"
            if task is None
            else self._retried_already(task) or call_of(task)
        )
        if isinstance(call, str) or task is None:
            refused[task_id] = str(call)
            return None
        options: Any = {"headers": {RETRY_OF: task_id}, "task_id": str(uuid4())}
        if call.queue:
            options["queue"] = call.queue
        # Noted before it is sent: the button may be pressed again meanwhile.
        self._cluster.model.note_retry(task_id, options["task_id"])
        if task.root_id and task.root_id != task_id:
            options |= {"root_id": task.root_id, "parent_id": task_id}
        return task_id, call, options

    def _retried_already(self, task: TaskRecord) -> str:
        """Return why the task is not retried again; "" if it can be."""
        new = self._cluster.model.retry_of(task.uuid)
        if task.state != FAILURE or new is None:
            return ""
        return f"it was retried already, as {new}; if that failed too, retry that one"

    def _send(self, ready: Sequence[Resending], sent: dict[str, str], refused: dict[str, str]) -> None:
        for task_id, call, options in ready:
            try:
                sent[task_id] = self._app.send(call.name, call.args, call.kwargs, options).id
            except (UmbelError, TypeError, ValueError) as error:
                refused[task_id] = str(error)

    # -- messages --------------------------------------------------------------------------------

    async def _letters(self, action: RequeueDead | DropDead) -> Outcome:
        known = await self._broker.dead_letters(LETTERS_MAX)
        chosen = by_name(known)
        missing = {name: "there is no such dead letter" for name in action.letters if name not in chosen}
        ids = [letter.letter_id for letter in known] if action.every else []
        ids += [chosen[name] for name in action.letters if name in chosen]
        ids = list(dict.fromkeys(ids))
        if isinstance(action, DropDead):
            return {"count": await self._broker.drop_dead(ids), "refused": missing}
        return {"count": await self._broker.requeue_dead(ids), "refused": missing}

    # -- the schedule and elections --------------------------------------------------------------

    def _periodic(self, name: str) -> Any:
        found = next((periodic for periodic in self._app.periodic_tasks if periodic.name == name), None)
        if found is None:
            raise Refused(404, "Not Found", f"this app has no periodic task {name!r}")
        return found

    async def _run_now(self, name: str) -> Outcome:
        signature = self._periodic(name).signature.clone()
        result = await asyncio.to_thread(signature.apply_async)
        return {"count": 1, "sent": [result.id]}

    async def _change_pauses(self, edit: Callable[[frozenset[str]], frozenset[str]]) -> Outcome:
        if await change_pauses(self._broker, edit):
            return {"count": 1}
        return {"problem": "another process is changing which periodic tasks are paused; try again"}

    async def _elect(self, action: StartElection) -> Outcome:
        elect = partial(self._app.control.election, action.id, action.topic, action.argument, timeout=0)
        try:
            outcome = await asyncio.to_thread(elect)
        except (UmbelError, TypeError, ValueError) as error:
            return {"problem": str(error)}
        return {"count": 1, "replies": {"election": {"state": outcome.state, "winner": outcome.winner}}}


def by_name(known: Sequence[DeadLetter]) -> dict[str, int | str]:
    """Return dead letters by their ids and by those of their tasks.

    Clients choose task ids, so letter ids take precedence.
    """
    of_tasks = {letter_row(letter).task_id: letter.letter_id for letter in known}
    return of_tasks | {str(letter.letter_id): letter.letter_id for letter in known}


def _command(action: AnyAction) -> tuple[str, Mapping[str, Any]]:
    """Return the control command and the arguments of an action."""
    match action:
        case Grow():
            return "pool_grow", {"n": action.n}
        case Shrink():
            return "pool_shrink", {"n": action.n}
        case Autoscale():
            return "autoscale", {"max": action.max, "min": action.min}
        case AddQueue():
            return "add_consumer", {"queue": action.queue}
        case CancelQueue():
            return "cancel_consumer", {"queue": action.queue}
        case RateLimit():
            return "rate_limit", {"task_name": action.task, "rate_limit": action.rate}
        case TimeLimit():
            return "time_limit", {"task_name": action.task, "soft": action.soft, "hard": action.hard}
        case RestartPool():
            return "pool_restart", {"reload": False}
        case _:
            raise AssertionError(f"{type(action).__name__} is not a command")


def _answered(answers: Answers, count: int = 0) -> Outcome:
    return {
        "replies": dict(answers.replies),
        "silent": [member.node for member in answers.silent],
        "refused": answers.refusals,
        "count": count or len(answers.replies),
    }
