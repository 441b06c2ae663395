"""History page: the recorded attempts beyond the last hour, with filters in the URL, and SQL queries."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.markup import Markup, count
from umbel.history.query import Answer
from umbel.web.history import ROWS_MAX, is_own_page, page_proof, query_lake, query_lake_as_file, read_lake
from umbel.web.http import visitor_of
from umbel.web.lake import FORMATS, GROUPS, TIMEOUT_S, AttemptFilter, Past, past
from umbel.web.pages.drawings import heat_map
from umbel.web.pages.frame import render
from umbel.web.pages.labels import parse_local
from umbel.web.settings import Role

DOWNLOAD_MAX = 100_000
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
UNPROVEN = "the query was not run, as another site may have sent it; look at it, and press Run"
EXAMPLE = "select name, count(*) as n, avg(run_s) as run_s\nfrom attempts group by name order by n desc"


async def history(request: Request) -> Response:
    """Answer with the figures of the matching attempts, and the rows of the SQL query if there is one."""
    given, visitor, problem = dict(request.query_params), visitor_of(request), ""
    found: Past | None = None
    answer: Answer | None = None
    filters = {key: given[key] for key in asdict(AttemptFilter()) if given.get(key)}
    charted: Mapping[str, Any] = filters  # refused by the chart's address too if a filter cannot be read
    by = given.get("by", "name") if given.get("by") in GROUPS else "name"
    try:
        wanted, mark = _wanted(given), _time(given, "mark")
        charted = asdict(wanted)
        found = await read_lake(request, partial(past, wanted=wanted, by=by, mark=mark), Past)
        if given.get("sql") and visitor.role.may(Role.OPERATOR):
            if not is_own_page(request, given.get("proof", "")):
                raise HistoryError(UNPROVEN)
            answer = await query_lake(request, given["sql"], ROWS_MAX)
    except (HistoryError, ConfigurationError, ValueError) as error:
        problem = str(error)
    return render(
        request,
        "history.html",
        past=found,
        problem=problem,
        given=given,
        by=by,
        groups=GROUPS,
        week=_week(found),
        answer=answer,
        rows=answer.rows if answer else [],
        may_query=visitor.role.may(Role.OPERATOR),
        proof=page_proof(visitor),
        example=EXAMPLE,
        rows_max=ROWS_MAX,
        timeout_s=TIMEOUT_S,
        filters=filters,
        wanted=charted,
    )


async def history_download(request: Request) -> Response:
    """Answer with the rows of a query as a CSV or Parquet file."""
    form = request.query_params.get("as", "csv")
    if form not in FORMATS:
        return Response(f"unknown format {form!r}; use csv or parquet", 400, media_type="text/plain")
    is_proven = is_own_page(request, request.query_params.get("proof", ""))
    if visitor_of(request).role.may(Role.OPERATOR) and not is_proven:
        return Response(UNPROVEN, 403, media_type="text/plain")
    try:
        sql = request.query_params.get("sql", "")
        body = await query_lake_as_file(request, sql, DOWNLOAD_MAX, form)
    except (HistoryError, ConfigurationError) as error:
        return Response(str(error), 400, media_type="text/plain; charset=utf-8")
    headers = {"Content-Disposition": f'attachment; filename="umbel-history.{form}"'}
    return Response(body, media_type=FORMATS[form][0], headers=headers)


def _wanted(given: Mapping[str, str]) -> AttemptFilter:
    named = {column: given.get(column, "") for column in GROUPS}
    return AttemptFilter(**named, since=_time(given, "since"), until=_time(given, "until"))


def _time(given: Mapping[str, str], name: str) -> float | None:
    return parse_local(given[name]) if given.get(name) else None


def _week(found: Past | None) -> Markup | None:
    if found is None or not any(map(any, found.week)):
        return None
    hours, days = [f"{hour:02}h" for hour in range(24)], list(zip(DAYS, found.week, strict=True))
    return heat_map("Attempts that ended, by day and hour (UTC)", days, hours, count, 12)
