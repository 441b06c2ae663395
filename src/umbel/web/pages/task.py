"""Task: everything about one task on one page: where it was, what made it wait, how it ended."""

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from umbel.history.markup import Markup
from umbel.history.scales import duration
from umbel.monitor.shapes import Workflow, WorkflowTask
from umbel.protocol.delivery.states import READY_STATES
from umbel.web.pages.drawing import workflow as graph
from umbel.web.pages.drawing.spacetime import spacetime
from umbel.web.pages.drawing.telling import story_of
from umbel.web.pages.frame import missing, render
from umbel.web.site import path_to, site_of


async def task(request: Request) -> Response:
    site, task_id = site_of(request), request.path_params["task_id"]
    detail = site.task(task_id)
    if detail is None:
        why = "It was never heard of, or was dropped from memory. The lake may have it: `umbel task show ID`."
        return missing(request, f"No task {task_id} is known", why)
    ended = detail.task.state in READY_STATES
    if request.query_params.get("part") == "buttons" and not ended:
        return Response(status_code=204)  # they stay as they are, with the focus that one may have
    flow = site.workflow(task_id)
    nodes: dict[str, str] = {node.node: node.state for node in site.nodes()}
    story = story_of(detail.events, detail.task.queue or "", nodes, site.happenings())
    return render(
        request,
        "task.html",
        detail=detail,
        task=detail.task,
        diagram=spacetime(story) if detail.events else None,
        flow=flow if flow is not None and len(flow.tasks) > 1 else None,
        drawn=_drawn(request, flow, task_id),
        ended=ended,
        as_curl=_as_curl(request, task_id),
    )


def _drawn(request: Request, flow: Workflow | None, task_id: str) -> Markup | None:
    if flow is None or len(flow.tasks) < 2:
        return None
    causes: dict[str, list[str]] = {}
    for before, after in flow.edges:
        causes.setdefault(after, []).append(before)
    steps = [
        graph.Step(
            one.uuid,
            one.name or one.uuid,
            one.state,
            tuple(causes.get(one.uuid, ())),
            _took(one),
            path_to(request, f"/tasks/{quote(one.uuid, safe='')}"),
        )
        for one in flow.tasks
    ]
    return graph.workflow(steps, flow.critical, task_id)


def _took(one: WorkflowTask) -> str:
    if one.started_at is None or one.ended_at is None:
        return ""
    return duration(max(0.0, one.ended_at - one.started_at))


def _as_curl(request: Request, task_id: str) -> str:
    """The same action by the API; the token is the reader's own."""
    address = f"{request.url.scheme}://{request.url.netloc}{path_to(request, '/api/v1/actions')}"
    body = f'{{"action": "retry", "ids": ["{quote(task_id, safe="-")}"]}}'
    headers = "-H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json'"
    return f"curl -X POST {address} {headers} -d '{body}'"
