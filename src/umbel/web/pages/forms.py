"""Forms: a form becomes an action, and its outcome is shown.

Two endpoints serve all pages. `/confirm` asks before an action: it says what the action does, and to how many
tasks or messages. `/do` performs it. Both read the fields of the action's record. A filter is sent as its
query string in `match`, and the count that was shown in `expected`.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import UmbelError
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.records import TaskFilter
from umbel.protocol.pidbox import error_of
from umbel.text import numbered
from umbel.web.actions import ActionResult, AnyAction, MoveMessages, OnTasks
from umbel.web.http import Refused, dashboard_of, visitor_of
from umbel.web.pages.frame import fragment
from umbel.web.pages.labels import look

LISTS = frozenset({"nodes", "ids", "letters", "columns"})
VERBS = {
    "revoke": "Revoke",
    "terminate": "Terminate",
    "retry": "Retry",
    "purge": "Purge the queue",
    "pause_queue": "Pause the queue",
    "resume_queue": "Resume the queue",
    "move_messages": "Move messages",
    "requeue_dead": "Requeue",
    "drop_dead": "Drop",
    "restart_pool": "Restart the pool",
    "stop": "Stop",
    "start_election": "Start an election",
    "end_sessions": "End the sessions of",
    "delete_view": "Delete the view",
}
MEANINGS = {
    "revoke": "Waiting tasks never start. Running tasks are not touched.",
    "terminate": "Running tasks are ended with SIGTERM and count as revoked.",
    "retry": "Each is sent again as a new message with the same arguments.",
    "purge": "Every waiting message is removed. This cannot be undone.",
    "pause_queue": "No worker takes messages from it until it is resumed. Running tasks are not touched.",
    "move_messages": "They keep their ids, priorities and times. Messages that workers have claimed stay.",
    "requeue_dead": "They return to their queues, marked as redelivered; starts are counted from 0.",
    "drop_dead": "They are removed. This cannot be undone.",
    "end_sessions": "Every browser in which this name is logged in is logged out. Tokens stay valid.",
    "restart_pool": "Child processes are replaced as they become idle.",
    "delete_view": "It is deleted for everyone who uses this dashboard. Tasks are not touched.",
    "stop": "The node takes no new tasks, finishes the running ones, and leaves the cluster.",
}
DANGEROUS = frozenset({"purge", "drop_dead", "stop", "terminate"})


async def confirm(request: Request) -> Response:
    """Answer with the question before an action: what it does, and to how many tasks or messages."""
    fields = _fields(request.query_params)
    try:
        action = _action(fields)
    except msgspec.ValidationError as error:
        return _problem(request, str(error))
    name = str(fields["action"])
    count = _count(dashboard_of(request).cluster, action)
    if isinstance(action, OnTasks) and action.match is not None:
        fields["expected"] = str(count)
    listed = {key: value if isinstance(value, list) else [value] for key, value in fields.items()}
    return fragment(
        request,
        "confirm.html",
        question=_question(name, action, count),
        meaning=MEANINGS.get(name, ""),
        verb=VERBS.get(name, name),
        danger=name in DANGEROUS,
        fields=[(key, item) for key, items in listed.items() for item in items],
        nothing=count == 0,
    )


async def do(request: Request) -> Response:
    """Perform the action of a form, and answer with the replies; the page refreshes the parts that
    changed.
    """
    form = QueryParams((await request.body()).decode("utf-8", "replace"))
    try:
        action = _action(_fields(form))
        result = await dashboard_of(request).act(visitor_of(request), action)
    except (msgspec.ValidationError, UmbelError, Refused) as error:
        return _problem(request, str(error))
    name = str(type(action).__struct_config__.tag)
    return fragment(
        request,
        "replies.html",
        headers={"HX-Trigger": "acted"},
        name=name,
        result=result,
        replies=_replies(result),
        sentence=_outcome_sentence(name, result),
    )


def _problem(request: Request, problem: str) -> Response:
    return fragment(request, "problem.html", problem=problem)


def _fields(given: QueryParams) -> dict[str, Any]:
    """Return the form's fields without the empty ones."""
    names = dict.fromkeys(given.keys())
    fields: dict[str, Any] = {}
    for name in names:
        values = [text for text in given.getlist(name) if text]
        if values:
            fields[name] = values if name in LISTS else values[-1]
    return fields


def _action(fields: Mapping[str, Any]) -> AnyAction:
    given = dict(fields)
    if "match" in given:
        given["match"] = filter_of(dict(parse_qsl(given["match"])))
    action: AnyAction = msgspec.convert(given, AnyAction, strict=False)
    return action


def filter_of(fields: Mapping[str, str]) -> TaskFilter:
    """Return the filter that a query string names; unknown fields are ignored."""
    known = {name: fields[name] for name in TaskFilter.__struct_fields__ if fields.get(name)}
    return msgspec.convert(known, TaskFilter, strict=False)


def _count(cluster: KnownCluster, action: AnyAction) -> int | None:
    match action:
        case OnTasks(match=TaskFilter() as wanted):
            return cluster.count(wanted)
        case OnTasks(ids=ids):
            return len(ids)
        case MoveMessages():
            waiting = sum(
                queue.ready + queue.delayed for queue in cluster.queues() if queue.queue == action.queue
            )
            return waiting if action.limit is None else min(action.limit, waiting)
        case _:
            letters = getattr(action, "letters", None)
            return len(letters) if letters and not getattr(action, "every", False) else None


def _question(name: str, action: AnyAction, count: int | None) -> str:
    verb = VERBS.get(name, name)
    named = (getattr(action, field, "") for field in ("queue", "name", "view"))
    target = next(filter(None, named), "") or ", ".join(action.nodes)
    if isinstance(action, OnTasks):
        matching = "matches" if count == 1 else "match"
        which = f" that {matching} the filter" if action.match is not None else ""
        return f"{verb} {numbered(count or 0, 'task')}{which}?"
    if isinstance(action, MoveMessages):
        return f"Move {numbered(count or 0, 'message')} from {action.queue} to {action.target}?"
    if getattr(action, "every", False):
        return f"{verb} all dead letters?"
    if count is not None:
        return f"{verb} {numbered(count, 'dead letter')}?"
    return f"{verb} {target}?" if target else f"{verb}?"


def _outcome_sentence(name: str, result: ActionResult) -> str:
    """Return the outcome in one sentence."""
    if result.problem:
        return f"{name}: {result.problem}"
    parts = [numbered(result.count, "item")] if result.count else []
    if result.replies:
        parts.append(f"{numbered(len(result.replies), 'node')} replied")
    if result.silent:
        parts.append(f"{numbered(len(result.silent), 'node')} did not reply")
    if result.refused:
        parts.append(f"{len(result.refused):,} refused")
    return f"{name.replace('_', ' ')}: {', '.join(parts) or ('done' if result.done else 'not done')}"


def _replies(result: ActionResult) -> list[tuple[str, str, str]]:
    """Return (node or id, tone, text) for each reply, missing reply and refusal."""
    replied = [
        (node, "good" if error_of(reply) is None else "bad", _words(reply))
        for node, reply in result.replies.items()
    ]
    silent = [(node, look("silent").tone, "no reply") for node in result.silent]
    refused = [(name, "bad", why) for name, why in result.refused.items() if name not in result.replies][:20]
    return [*replied, *silent, *refused]


def _words(reply: Any) -> str:
    if isinstance(reply, dict) and len(reply) == 1:
        [(key, value)] = reply.items()
        if key in {"ok", "error"}:
            return str(value)
    return reply if isinstance(reply, str) else msgspec.json.encode(reply).decode()
