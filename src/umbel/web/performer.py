"""Performer: carries out actions: by the workers, by the broker, in the dashboard's file, or by sending a
task.

`Dashboard.act` has checked the visitor's role and written the audit entry. Workers refuse what their
`control_allow` does not allow, and the refusal is in the reply.
"""

import ast
import asyncio
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sqlite3 import Error as FileError
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from umbel.app.app import App
from umbel.brokers.interface import Broker, DeadLetter
from umbel.control.client import ControlClient
from umbel.control.failures import FailureFilter, find_failed, retry_failed
from umbel.control.queue_pauses import move_messages, pause_queue, resume_queue
from umbel.errors import UmbelError
from umbel.events.view import TaskRecord
from umbel.launch.timetable import change_pauses
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.records import TaskFilter, letter_row
from umbel.protocol.delivery.sensitive import MASK
from umbel.protocol.delivery.states import FAILURE
from umbel.protocol.pidbox import Answers
from umbel.web import actions
from umbel.web.action_events import MARK, EventPublisher
from umbel.web.actions import IDS_MAX, VIEW_BYTES_MAX, VIEWS_MAX, AnyAction, SavedView
from umbel.web.http import Refused
from umbel.web.journal import Journal
from umbel.wire.retried import RETRY_OF

# ---- calls from events -----------------------------------------------------------------------------

UNSURE = ("...", "…", MASK)  # the text of arguments that were cut or masked
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
    """Return the call of a task for sending it again, or why the call is not known.

    Events carry arguments as text. The text is used if it is complete, a literal, and nothing in it is
    masked, because a task that runs with half of its arguments is worse than a task that does not run.
    """
    if not task.name:
        return "its name is unknown: no event of its sending or receipt was received"
    args, kwargs = _literal(task.args or "()"), _literal(task.kwargs or "{}")
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        return "its arguments are incomplete: they were cut, masked, or are not plain data"
    return ResendableCall(task.name, list(args), kwargs, task.queue)


def as_command(call: ResendableCall) -> str:
    """Return the `umbel call` command that sends the call; "" if the arguments are not JSON."""
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


# ---- performer -------------------------------------------------------------------------------------

LETTERS_MAX = 100_000
SEND_AT_ONCE = 50
Outcome = dict[str, Any]  # fields of ActionResult
Resending = tuple[str, ResendableCall, Any]  # the id of a task, its call, and options for sending it

COMMANDS: Mapping[type[actions.Action], tuple[str, Callable[[Any], Mapping[str, Any]]]] = {
    actions.Grow: ("pool_grow", lambda action: {"n": action.n}),
    actions.Shrink: ("pool_shrink", lambda action: {"n": action.n}),
    actions.Autoscale: ("autoscale", lambda action: {"max": action.max, "min": action.min}),
    actions.AddQueue: ("add_consumer", lambda action: {"queue": action.queue}),
    actions.CancelQueue: ("cancel_consumer", lambda action: {"queue": action.queue}),
    actions.RateLimit: (
        "rate_limit",
        lambda action: {"task_name": action.task, "rate_limit": action.rate},
    ),
    actions.TimeLimit: (
        "time_limit",
        lambda action: {"task_name": action.task, "soft": action.soft, "hard": action.hard},
    ),
    actions.RestartPool: ("pool_restart", lambda _: {"reload": False}),
}
"""The control command of each action that nodes carry out, and its arguments."""

_WITHOUT_NODES: Sequence[tuple[type[actions.Action], str]] = (
    (actions.OnTasks, "tasks are looked for on all nodes"),
    (actions.PauseQueue, "queues belong to the whole cluster"),
    (actions.ResumeQueue, "queues belong to the whole cluster"),
    (actions.MoveMessages, "queues belong to the whole cluster"),
    (actions.EndSessions, "sessions are those of this dashboard"),
    (actions.SaveView, "saved views are stored by the dashboard, not by workers"),
    (actions.DeleteView, "saved views are stored by the dashboard, not by workers"),
)
"""The actions that no node carries out, and why `nodes` must be empty."""


class Performer:
    """Carries out actions that were allowed and audited."""

    def __init__(
        self,
        app: App,
        broker: Broker,
        cluster: KnownCluster,
        publisher: EventPublisher,
        journal: Journal,
        end_sessions: Callable[[str], int],
    ) -> None:
        self._app, self._broker, self._cluster, self._publisher = app, broker, cluster, publisher
        self._journal, self._end_sessions = journal, end_sessions

    def check(self, action: AnyAction) -> AnyAction:
        """Return the action with its tasks listed by id; Refused for an action that cannot be carried out."""
        for kind, reason in _WITHOUT_NODES:
            if isinstance(action, kind) and action.nodes:
                raise _unprocessable(f"{reason}; leave out `nodes`")
        match action:
            case actions.OnTasks():
                found: AnyAction = self._listed(action)
                return found
            case actions.Stop(nodes=[]):
                raise _unprocessable("name the nodes to stop in `nodes`")
            case actions.RequeueDead() | actions.DropDead() if action.every == bool(action.letters):
                raise _unprocessable("give exactly one of `letters` and `every`")
            case actions.SaveView() | actions.DeleteView():
                _check_view(action)
            case actions.RunPeriodic() | actions.PausePeriodic() | actions.ResumePeriodic():
                self._periodic(action.name)
        return action

    async def perform(self, action: AnyAction) -> Outcome:
        """Carry out an action; return the fields of its result."""
        match action:
            case actions.Revoke() | actions.Terminate():
                terminate = isinstance(action, actions.Terminate)
                signal = action.signal if isinstance(action, actions.Terminate) else ""
                answers = self._cluster.feed.revoke(action.ids, terminate=terminate, signal=signal)
                return _answered(await answers, len(action.ids))
            case actions.Retry():
                return await self._retry(action.ids)
            case actions.Purge():
                return {"count": await self._broker.purge(action.queue)}
            case actions.PauseQueue() | actions.ResumeQueue() | actions.MoveMessages():
                return await self._change_queue(action)
            case actions.RequeueDead() | actions.DropDead():
                return await self._letters(action)
            case actions.Stop():
                await self._cluster.feed.tell("shutdown", {}, action.nodes)
                return {"count": len(action.nodes)}
            case actions.RunPeriodic():
                signature = self._periodic(action.name).signature.clone()
                return {"count": 1, "sent": [(await asyncio.to_thread(signature.apply_async)).id]}
            case actions.PausePeriodic():
                return await self._change_pauses(lambda paused: paused | {action.name})
            case actions.ResumePeriodic():
                return await self._change_pauses(lambda paused: paused - {action.name})
            case actions.MarkMoment():
                await self._publisher.publish(MARK, {"text": action.text})
                return {"count": 1}
            case actions.StartElection():
                return await self._elect(action)
            case actions.EndSessions():
                return {"count": self._end_sessions(action.name)}
            case actions.SaveView() | actions.DeleteView():
                return await self._change_views(action)
            case _:
                command, arguments = COMMANDS[type(action)]
                return _answered(await self._cluster.feed.ask(command, arguments(action), action.nodes))

    # -- tasks -----------------------------------------------------------------------------------

    def _listed(self, action: actions.OnTasks) -> Any:
        if bool(action.ids) == (action.match is not None):
            raise _unprocessable("give exactly one of `ids` and `match`, to choose the tasks")
        if action.match is None:
            return action
        if action.match == TaskFilter():
            raise _unprocessable("an empty filter matches every task; narrow it")
        found = self._cluster.ids(action.match)
        if len(found) > IDS_MAX:
            raise _unprocessable(f"more than {IDS_MAX:,} tasks match; narrow the filter")
        if action.expected is not None and len(found) > action.expected:
            detail = f"{len(found)} tasks match now, not {action.expected}; reload the page and try again"
            raise Refused(409, "Conflict", detail)
        return msgspec.structs.replace(action, ids=found, match=None, expected=None)

    async def _retry(self, ids: Sequence[str]) -> Outcome:
        """Send tasks again: from the retained message of a failure, else from the call that its events
        describe.

        Events are not signed. So with signing keys only retained messages are sent, or a forged event would
        be signed. A failure without a retained message that was retried already is refused. The model is read
        on the event loop, which changes it; only sending happens in a thread.
        """
        found = await find_failed(self._broker, FailureFilter(ids=frozenset(ids)))
        accept = self._app.settings.accept_content
        retained = await retry_failed(self._broker, found, accept=accept, only_verified=True)
        refused = retained.refused | dict.fromkeys(retained.gone, "it was retried by someone else just now")
        sent = dict(retained.sent)
        for old, new in retained.sent.items():
            self._cluster.model.note_retry(old, new)
        others = [task_id for task_id in dict.fromkeys(ids) if task_id not in sent and task_id not in refused]
        if self._app.settings.keyring is not None:
            refused |= dict.fromkeys(others, ONLY_RETAINED)
            others = []
        for start in range(0, len(others), SEND_AT_ONCE):
            calls = [self._call(task_id, refused) for task_id in others[start : start + SEND_AT_ONCE]]
            ready = [call for call in calls if call is not None]
            await asyncio.to_thread(self._send, ready, sent, refused)
            for task_id, _call, _options in ready:
                if task_id in refused:
                    self._cluster.model.forget_retry(task_id)
        in_order = [sent[task_id] for task_id in dict.fromkeys(ids) if task_id in sent]
        return {"count": len(sent), "sent": in_order, "refused": refused}

    def _call(self, task_id: str, refused: dict[str, str]) -> Resending | None:
        task, model = self._cluster.model.state.task(task_id), self._cluster.model
        if task is None:
            refused[task_id] = "it is not in the dashboard's memory"
            return None
        retry = model.retry_of(task_id)
        if task.state == FAILURE and retry is not None:
            refused[task_id] = f"it was retried already, as {retry}; if that failed too, retry that one"
            return None
        call = call_of(task)
        if isinstance(call, str):
            refused[task_id] = call
            return None
        options: Any = {"headers": {RETRY_OF: task_id}, "task_id": str(uuid4())}
        if call.queue:
            options["queue"] = call.queue
        if task.root_id and task.root_id != task_id:
            options |= {"root_id": task.root_id, "parent_id": task_id}
        model.note_retry(task_id, options["task_id"])  # before it is sent: the button may be pressed again
        return task_id, call, options

    def _send(self, ready: Sequence[Resending], sent: dict[str, str], refused: dict[str, str]) -> None:
        for task_id, call, options in ready:
            try:
                sent[task_id] = self._app.send(call.name, call.args, call.kwargs, options).id
            except (UmbelError, TypeError, ValueError) as error:
                refused[task_id] = str(error)

    # -- queues and dead letters -----------------------------------------------------------------

    async def _change_queue(
        self, action: actions.PauseQueue | actions.ResumeQueue | actions.MoveMessages
    ) -> Outcome:
        try:
            if isinstance(action, actions.MoveMessages):
                moved = move_messages(self._broker, action.queue, action.target, limit=action.limit)
                return {"count": await moved}
            change = pause_queue if isinstance(action, actions.PauseQueue) else resume_queue
            outcome = await change(self._broker, ControlClient(self._broker), action.queue, timeout_s=None)
        except UmbelError as error:
            return {"problem": str(error)}
        reply = "no longer consuming" if outcome.paused else "consuming again"
        return {
            "count": 1,
            "replies": {node: {"ok": f"{reply} {outcome.queue}"} for node in outcome.told},
            "silent": list(outcome.silent),
            "refused": dict(outcome.refused),
        }

    async def _letters(self, action: actions.RequeueDead | actions.DropDead) -> Outcome:
        known = await self._broker.dead_letters(LETTERS_MAX)
        by_name = letters_by_name(known)
        missing = {name: "there is no such dead letter" for name in action.letters if name not in by_name}
        if action.every:
            ids = [letter.letter_id for letter in known]
        else:
            ids = list(dict.fromkeys(by_name[name] for name in action.letters if name in by_name))
        drops = isinstance(action, actions.DropDead)
        change = self._broker.drop_dead if drops else self._broker.requeue_dead
        return {"count": await change(ids), "refused": missing}

    # -- the schedule, elections, saved views ----------------------------------------------------

    def _periodic(self, name: str) -> Any:
        found = next((periodic for periodic in self._app.periodic_tasks if periodic.name == name), None)
        if found is None:
            raise Refused(404, "Not Found", f"this app has no periodic task {name!r}")
        return found

    async def _change_pauses(self, edit: Callable[[frozenset[str]], frozenset[str]]) -> Outcome:
        if await change_pauses(self._broker, edit):
            return {"count": 1}
        return {"problem": "another process is changing which periodic tasks are paused; try again"}

    async def _elect(self, action: actions.StartElection) -> Outcome:
        elect = partial(self._app.control.election, action.id, action.topic, action.argument, timeout=0)
        try:
            outcome = await asyncio.to_thread(elect)
        except (UmbelError, TypeError, ValueError) as error:
            return {"problem": str(error)}
        return {"count": 1, "replies": {"election": {"state": outcome.state, "winner": outcome.winner}}}

    async def _change_views(self, action: actions.SaveView | actions.DeleteView) -> Outcome:
        try:
            if isinstance(action, actions.DeleteView):
                if await asyncio.to_thread(self._journal.delete_view, action.view):
                    return {"count": 1}
                return {"refused": {action.view: "there is no such view"}}
            view = SavedView(
                name=action.view,
                match=action.match,
                order=action.order,
                columns=list(dict.fromkeys(action.columns)),
                saved_at=time(),
            )
            if await asyncio.to_thread(self._journal.save_view, view):
                return {"count": 1}
            return {"problem": f"there are {VIEWS_MAX} saved views already; delete some first"}
        except FileError as error:
            return {"problem": f"the dashboard's file cannot be written: {error}"}


def letters_by_name(known: Sequence[DeadLetter]) -> dict[str, int | str]:
    """Return the ids of dead letters by their own ids and by the ids of their tasks.

    Clients choose the ids of tasks, so a letter's own id takes precedence.
    """
    of_tasks = {letter_row(letter).task_id: letter.letter_id for letter in known}
    return of_tasks | {str(letter.letter_id): letter.letter_id for letter in known}


def _check_view(action: actions.SaveView | actions.DeleteView) -> None:
    if not action.view.strip() or not action.view.isprintable():
        raise _unprocessable("a view needs a name of letters, digits, signs and plain spaces")
    size = len(msgspec.json.encode(action))
    if size > VIEW_BYTES_MAX:
        raise _unprocessable(
            f"the view has {size:,} bytes, of {VIEW_BYTES_MAX:,} at most; shorten what it searches for"
        )


def _unprocessable(detail: str) -> Refused:
    return Refused(422, "Unprocessable", detail)


def _answered(answers: Answers, count: int = 0) -> Outcome:
    return {
        "replies": dict(answers.replies),
        "silent": [member.node for member in answers.silent],
        "refused": answers.refusals,
        "count": count or len(answers.replies),
    }
