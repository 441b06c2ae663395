"""History: what the lake's tables know beyond the last hour, with filters in the URL, and SQL."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.export import as_csv, as_parquet, for_spreadsheets, plain
from umbel.history.markup import Markup
from umbel.history.query import Answer
from umbel.history.scales import count
from umbel.web.looking_back import ROWS_MAX, TIMEOUT_S, look_back, may_query, query
from umbel.web.pages.drawing.heat import heat_map
from umbel.web.pages.frame import render
from umbel.web.pages.times import parse_local
from umbel.web.past import GROUPS, Past, Wanted, past, rates
from umbel.web.site import site_of, visitor_of

DOWNLOAD_MAX = 100_000
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
FORMATS: Mapping[str, tuple[str, Callable[[Answer], str | bytes]]] = {
    "csv": ("text/csv; charset=utf-8", lambda answer: as_csv(for_spreadsheets(answer))),
    "parquet": ("application/vnd.apache.parquet", as_parquet),
}
EXAMPLE = "select name, count(*) as n, avg(run_s) as run_s\nfrom attempts group by name order by n desc"


async def history(request: Request) -> Response:
    given, problem = dict(request.query_params), ""
    found: Past | None = None
    answer: Answer | None = None
    by = given.get("by", "name") if given.get("by") in GROUPS else "name"
    try:
        wanted, mark = _wanted(given), _time(given, "mark")
        found = await look_back(site_of(request), lambda tables: past(tables, wanted, by, mark))
        if given.get("sql") and may_query(visitor_of(request)):
            answer = await look_back(site_of(request), lambda tables: query(tables, given["sql"], ROWS_MAX))
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
        rows=[[plain(value) for value in row] for row in answer.rows] if answer else [],
        may_ask=may_query(visitor_of(request)),
        example=EXAMPLE,
        rows_max=ROWS_MAX,
        timeout_s=TIMEOUT_S,
        filters={key: given[key] for key in ("name", "queue", "worker", "since", "until") if given.get(key)},
    )


async def history_rates(request: Request) -> Response:
    """The columns of the charts."""
    try:
        wanted = _wanted(dict(request.query_params))
        found = await look_back(site_of(request), lambda tables: rates(tables, wanted))
    except (HistoryError, ConfigurationError, ValueError) as error:
        return Response(str(error), 404, media_type="text/plain")
    return Response(msgspec.json.encode(found), media_type="application/json")


async def history_download(request: Request) -> Response:
    """The rows of a query as a file."""
    form = request.query_params.get("as", "csv")
    if form not in FORMATS:
        return Response(f"unknown format {form!r}; use csv or parquet", 400, media_type="text/plain")
    if not may_query(visitor_of(request)):
        return Response("queries need the role operator", 403, media_type="text/plain")
    media_type, written = FORMATS[form]
    sql = request.query_params.get("sql", "")
    try:
        body = await look_back(site_of(request), lambda tables: written(query(tables, sql, DOWNLOAD_MAX)))
    except (HistoryError, ConfigurationError) as error:
        return Response(str(error), 400, media_type="text/plain; charset=utf-8")
    headers = {"Content-Disposition": f'attachment; filename="umbel-history.{form}"'}
    return Response(body, media_type=media_type, headers=headers)


def _wanted(given: Mapping[str, str]) -> Wanted:
    return Wanted(
        given.get("name", ""),
        given.get("queue", ""),
        given.get("worker", ""),
        _time(given, "since"),
        _time(given, "until"),
    )


def _time(given: Mapping[str, Any], name: str) -> float | None:
    return parse_local(given[name]) if given.get(name) else None


def _week(found: Past | None) -> Markup | None:
    if found is None or not any(map(any, found.week)):
        return None
    hours = [f"{hour:02}h" for hour in range(24)]
    return heat_map(
        "Attempts that ended, by day and hour (UTC)",
        list(zip(DAYS, found.week, strict=True)),
        hours,
        count,
        12,
    )
