"""Workflow: the tasks of one root as a graph, and the path through it that decided when it ended.

An edge is from a task to one that it sent. The critical path ends with the task that ended last and goes
back through what each waited for. A task waits for its parent; a chord's body is sent by the part that ended
last, which the events name as its parent, so the path runs through the slowest part.
"""

from collections.abc import Mapping, Sequence

from umbel.events.view import TaskRecord
from umbel.monitor.shapes import Workflow, WorkflowTask


def workflow_of(root_id: str, records: Sequence[TaskRecord], more: int = 0) -> Workflow:
    known = {one.uuid: one for one in records}
    critical = _critical(known)
    path = frozenset(critical)
    tasks = [_shown(one, one.uuid in path) for one in sorted(records, key=_order)]
    edges = [(one.parent_id, one.uuid) for one in records if one.parent_id in known and one.parent_id]
    begins = [one for task in tasks if (one := task.sent_at or task.started_at) is not None]
    ends = [task.ended_at for task in tasks if task.ended_at is not None]
    return Workflow(
        root_id=root_id,
        tasks=tasks,
        edges=sorted(edges),
        critical=critical,
        duration_s=max(0.0, max(ends) - min(begins)) if begins and ends else None,
        more=more,
    )


def ended_at(task: TaskRecord) -> float | None:
    return max(
        (at for at in (task.succeeded_at, task.failed_at, task.revoked_at) if at is not None), default=None
    )


def _critical(known: Mapping[str, TaskRecord]) -> list[str]:
    # A task that sent another one cannot be the end, even if its worker told of its ending later.
    sent = {one.parent_id for one in known.values() if ended_at(one) is not None}
    ended = [
        (at, one.uuid) for one in known.values() if (at := ended_at(one)) is not None and one.uuid not in sent
    ]
    if not ended:
        return []
    _, last = max(ended)
    path: list[str] = []
    step: str | None = last
    while step is not None and step in known and step not in path:
        path.append(step)
        step = known[step].parent_id
    return path[::-1]


def _order(task: TaskRecord) -> tuple[float, int, str]:
    first = task.first_sent_at or task.first_received_at or task.first_started_at or task.state_at or 0.0
    return (first, task.clock, task.uuid)


def _shown(task: TaskRecord, is_critical: bool) -> WorkflowTask:
    return WorkflowTask(
        uuid=task.uuid,
        name=task.name or "",
        state=task.state,
        parent_id=task.parent_id or "",
        worker=task.worker or "",
        sent_at=task.first_sent_at or task.first_received_at,
        started_at=task.started_at,
        ended_at=ended_at(task),
        is_critical=is_critical,
    )
