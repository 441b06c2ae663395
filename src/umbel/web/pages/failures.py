"""Dead letters and failures: what no retry will bring back by itself, grouped by task and reason."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import BrokerError
from umbel.monitor.shapes import DeadLetterRow, TaskFilter
from umbel.web.pages.frame import render
from umbel.web.site import Site, site_of

LETTERS_MAX = 500
FAILED_MAX = 1000
REASON_MAX = 120
_NUMBER = re.compile(r"(?<![A-Za-z])\d[\d.]*|\b[0-9a-f]{8}-[0-9a-f-]{27}\b")


@dataclass(frozen=True, slots=True)
class Group:
    task: str
    reason: str
    count: int
    newest: str
    """The id of one of them, to look at."""


async def failures(request: Request) -> Response:
    site = site_of(request)
    wanted_task, wanted_reason = (request.query_params.get(name, "") for name in ("task", "reason"))
    problem, letters = "", list[DeadLetterRow]()
    try:
        letters = await site.dead_letters(LETTERS_MAX)
    except BrokerError as error:
        problem = str(error)
    shown = [
        one
        for one in letters
        if (not wanted_task or one.task == wanted_task)
        and (not wanted_reason or kind_of(one.reason) == wanted_reason)
    ]
    return render(
        request,
        "failures.html",
        problem=problem,
        letters=shown,
        every=len(letters),
        groups=letter_groups(letters),
        failed=failed_groups(site),
        wanted_task=wanted_task,
        wanted_reason=wanted_reason,
    )


def kind_of(reason: str) -> str:
    """What many errors have in common: the first line, whatever numbers it names."""
    return _NUMBER.sub("#", reason.split("\n", 1)[0])[:REASON_MAX]


def letter_groups(letters: Sequence[DeadLetterRow]) -> list[Group]:
    newest: dict[tuple[str, str], str] = {}
    for one in letters:
        newest.setdefault((one.task, kind_of(one.reason)), one.task_id)
    counts = Counter((one.task, kind_of(one.reason)) for one in letters)
    return [Group(task, reason, many, newest[task, reason]) for (task, reason), many in counts.most_common()]


def failed_groups(site: Site) -> list[Group]:
    """Of the newest failures in memory, by task and the first line of the error."""
    page = site.tasks(TaskFilter(state="FAILURE"), limit=FAILED_MAX)
    counts: Counter[tuple[str, str]] = Counter()
    newest: dict[tuple[str, str], str] = {}
    for one in page.tasks:
        key = one.name or "?", kind_of(one.exception or "?")
        counts[key] += 1
        newest.setdefault(key, one.uuid)
    return [
        Group(task, reason, many, newest[task, reason]) for (task, reason), many in counts.most_common(50)
    ]
