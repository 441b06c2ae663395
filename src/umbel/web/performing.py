"""Performing: an action is carried out: by the workers, by the broker, or by sending a task.

Nothing here asks who may; `Dashboard.act` has done so and written it down. What the workers do not allow
(`control_allow`) they refuse, and their refusal is in the replies.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from umbel.app.app import App
from umbel.brokers.interface import Broker, DeadLetter
from umbel.coordination.failures import Retried, Wanted, find_failed, retry_failed
from umbel.errors import UmbelError
from umbel.events.view import TaskRecord
from umbel.launch.timetable import change_pauses
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.messages import letter_row
from umbel.monitor.shapes import TaskFilter
from umbel.protocol.delivery.states import FAILURE
from umbel.protocol.pidbox import Answers
from umbel.web.actions import (
    IDS_MAX,
    AddQueue,
    AnyAction,
    Autoscale,
    CancelQueue,
    DeleteView,
    DropDead,
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
    SaveView,
    Shrink,
    StartElection,
    Stop,
    Terminate,
    TimeLimit,
)
from umbel.web.problems import Refused
from umbel.web.queue_actions import change_queue
from umbel.web.resending import Call, call_of
from umbel.web.telling import MARK, Teller
from umbel.web.view_actions import ViewStore, change_views, check_view
from umbel.wire.retried import RETRY_OF

LETTERS_MAX = 100_000
ASK_S = 3.0
SEND_AT_ONCE = 50
Outcome = dict[str, Any]  # fields of ActionResult
Resending = tuple[str, Call, Any]  # the task that is sent again, and how


class Performer:
    def __init__(
        self, app: App, broker: Broker, cluster: KnownCluster, teller: Teller, views: ViewStore
    ) -> None:
        self._app, self._broker, self._cluster, self._teller = app, broker, cluster, teller
        self._views = views

    def check(self, action: AnyAction) -> AnyAction:
        """The action with its tasks named one by one; Refused for one that cannot be carried out."""
        if isinstance(action, OnTasks):
            named: AnyAction = self._named(action)
            return named
        if isinstance(action, Stop) and not action.nodes:
            raise Refused(422, "Unprocessable", "name the nodes to stop in `nodes`")
        if isinstance(action, RequeueDead | DropDead) and action.every == bool(action.letters):
            raise Refused(422, "Unprocessable", "give exactly one of `letters` and `every`")
        if isinstance(action, PauseQueue | ResumeQueue | MoveMessages) and action.nodes:
            raise Refused(422, "Unprocessable", "queues belong to the whole cluster; leave out `nodes`")
        if isinstance(action, SaveView | DeleteView):
            check_view(action)
        if isinstance(action, RunPeriodic | PausePeriodic | ResumePeriodic):
            self._periodic(action.name)
        return action

    async def perform(self, action: AnyAction) -> Outcome:
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
            case SaveView() | DeleteView():
                return await change_views(self._views, action)
            case _:
                command, arguments = _command(action)
                asked = self._cluster.feed.ask(command, arguments, nodes=action.nodes, timeout_s=ASK_S)
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
        told = self._cluster.feed.revoke(action.ids, terminate=ends, signal=signal, timeout_s=ASK_S)
        return _answered(await told, len(action.ids))

    async def _retry(self, ids: Sequence[str]) -> Outcome:
        """From the kept message of a failure, or else from what its events say of the call.

        A failure whose message is not kept and that is known to be retried is refused. What is known is read
        here, on the loop, which changes it; only sending is done in a thread.
        """
        kept = await self._retry_kept(ids)
        refused = kept.refused | dict.fromkeys(kept.gone, "somebody else retried it just now")
        sent = dict(kept.sent)
        for old, new in kept.sent.items():
            self._cluster.model.note_retry(old, new)
        others = [one for one in dict.fromkeys(ids) if one not in sent and one not in refused]
        for start in range(0, len(others), SEND_AT_ONCE):
            calls = [self._call(one, refused) for one in others[start : start + SEND_AT_ONCE]]
            ready = [call for call in calls if call is not None]
            await asyncio.to_thread(self._send, ready, sent, refused)
            for task_id, _call, _options in ready:
                if task_id in refused:
                    self._cluster.model.forget_retry(task_id)
        in_order = [sent[one] for one in dict.fromkeys(ids) if one in sent]
        return {"count": len(sent), "sent": in_order, "refused": refused}

    async def _retry_kept(self, ids: Sequence[str]) -> Retried:
        found = await find_failed(self._broker, Wanted(ids=frozenset(ids)))
        return await retry_failed(self._broker, found, accept=self._app.settings.accept_content)

    def _call(self, task_id: str, refused: dict[str, str]) -> Resending | None:
        task = self._cluster.model.state.task(task_id)
        call = "it is not known any more" if task is None else self._retried_already(task) or call_of(task)
        if isinstance(call, str) or task is None:
            refused[task_id] = str(call)
            return None
        options: Any = {"headers": {RETRY_OF: task_id}, "task_id": str(uuid4())}
        if call.queue:
            options["queue"] = call.queue
        self._cluster.model.note_retry(task_id, options["task_id"])  # now: somebody may press again meanwhile
        if task.root_id and task.root_id != task_id:
            options |= {"root_id": task.root_id, "parent_id": task_id}
        return task_id, call, options

    def _retried_already(self, task: TaskRecord) -> str:
        """Why it is not retried again; "": it can be."""
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
        ids = [one.letter_id for one in known] if action.every else []
        ids += [chosen[name] for name in action.letters if name in chosen]
        ids = list(dict.fromkeys(ids))
        if isinstance(action, DropDead):
            return {"count": await self._broker.drop_dead(ids), "refused": missing}
        return {"count": await self._broker.requeue_dead(ids), "refused": missing}

    # -- the schedule and elections --------------------------------------------------------------

    def _periodic(self, name: str) -> Any:
        found = next((one for one in self._app.periodic_tasks if one.name == name), None)
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
    """Letters by their own ids, and by those of their tasks, which clients choose: they give way."""
    of_tasks = {letter_row(one).task_id: one.letter_id for one in known}
    return of_tasks | {str(one.letter_id): one.letter_id for one in known}


def _command(action: AnyAction) -> tuple[str, Mapping[str, Any]]:
    """The control command that an action is."""
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
    refused = {
        node: str(reply["error"])
        for node, reply in answers.replies.items()
        if isinstance(reply, dict) and "error" in reply
    }
    return {
        "replies": dict(answers.replies),
        "silent": [one.node for one in answers.silent],
        "refused": refused,
        "count": count or len(answers.replies),
    }
