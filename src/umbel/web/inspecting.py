"""Inspecting: one worker, as it describes itself just now."""

import asyncio
from time import time
from typing import Any

from umbel.events.view import TaskRecord
from umbel.monitor.feed import Feed
from umbel.monitor.shapes import Node, Worker
from umbel.web.redaction import LIST_MAX, redact_data

ASK_S = 1.5
QUESTIONS = ("stats", "active", "reserved", "active_queues", "registered", "conf")
SHOWN_MAX = 500


async def look_at_worker(feed: Feed, node: Node, failures: list[TaskRecord]) -> Worker:
    asked = [feed.ask(question, {}, node.node, timeout_s=ASK_S) for question in QUESTIONS]
    answers = await asyncio.gather(*asked)
    found = {
        question: redact_data(answer.replies.get(node.node), LIST_MAX)
        for question, answer in zip(QUESTIONS, answers, strict=True)
    }
    stats = found["stats"] if isinstance(found["stats"], dict) else {}
    active = _maps(found["active"])
    return Worker(
        node=node,
        silent=not stats,
        stats=stats,
        children=_children(stats, active),
        active=active,
        reserved=_maps(found["reserved"]),
        queues=sorted(str(one["name"]) for one in _maps(found["active_queues"]) if "name" in one),
        registered=texts_of(found["registered"]),
        settings=found["conf"] if isinstance(found["conf"], dict) else {},
        failures=failures,
    )


def texts_of(reply: Any) -> list[str]:
    """Nothing for a reply that is a refusal."""
    return [str(one) for one in reply][:SHOWN_MAX] if isinstance(reply, list) else []


def _maps(reply: Any) -> list[dict[str, Any]]:
    return [one for one in reply if isinstance(one, dict)][:SHOWN_MAX] if isinstance(reply, list) else []


def _children(stats: dict[str, Any], active: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each child process with what it runs; Celery's workers name theirs in the same places."""
    pool = stats.get("pool")
    processes = pool.get("processes") if isinstance(pool, dict) else None
    runs = {one.get("worker_pid"): one for one in active}
    now = time()
    children = []
    for pid in processes[:SHOWN_MAX] if isinstance(processes, list) else []:
        task = runs.get(pid, {})
        began = task.get("time_start")
        children.append(
            {
                "pid": pid,
                "task": str(task.get("name", "")),
                "task_id": str(task.get("id", "")),
                "age_s": round(max(0.0, now - began), 1)
                if isinstance(began, int | float) and began
                else None,
            }
        )
    return children
