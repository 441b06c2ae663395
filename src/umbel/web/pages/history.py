"""History page: the recorded attempts beyond the last hour, with filters in the URL, and SQL queries."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.charts import Markup, count
from umbel.history.query import Answer
from umbel.monitor.records import Rates
from umbel.web.lake import FORMATS, GROUPS, TIMEOUT_S, AttemptFilter, Past, past, rates
from umbel.web.pages.drawings import heat_map
from umbel.web.pages.frame import render
from umbel.web.pages.labels import parse_local
from umbel.web.site import (
    ROWS_MAX,
    caller_of,
    is_own,
    may_query,
    page_proof,
    query_lake,
    query_lake_as_file,
    read_lake,
)

DOWNLOAD_MAX = 100_000
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
UNPROVEN = "the query was not run, as another site may have sent it; look at it, and press Run"
EXAMPLE = "select name, count(*) as n, avg(run_s) as run_s\nfrom attempts group by name order by n desc"


async def history(request: Request) -> Response:
    """Answer with the figures of the matching attempts, and the rows of the SQL query if there is one."""
    given, caller, problem = dict(request.query_params), caller_of(request), ""
    found: Past | None = None
    answer: Answer | None = None
    by = given.get("by", "name") if given.get("by") in GROUPS else "name"
    try:
        wanted, mark = _wanted(given), _time(given, "mark")
        found = await read_lake(caller, partial(past, wanted=wanted, by=by, mark=mark), Past)
        if given.get("sql") and may_query(caller.visitor):
            if not is_own(caller, given.get("proof", "")):
                raise HistoryError(UNPROVEN)
            answer = await query_lake(caller, given["sql"], ROWS_MAX)
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
        may_ask=may_query(caller.visitor),
        proof=page_proof(caller.visitor),
        example=EXAMPLE,
        rows_max=ROWS_MAX,
        timeout_s=TIMEOUT_S,
        filters={key: given[key] for key in ("name", "queue", "worker", "since", "until") if given.get(key)},
    )


async def history_rates(request: Request) -> Response:
    """Answer with the columns of the charts, as JSON."""
    try:
        wanted = _wanted(dict(request.query_params))
        found = await read_lake(caller_of(request), partial(rates, wanted=wanted), Rates)
    except (HistoryError, ConfigurationError, ValueError) as error:
        return Response(str(error), 404, media_type="text/plain")
    return Response(msgspec.json.encode(found), media_type="application/json")


async def history_download(request: Request) -> Response:
    """Answer with the rows of a query as a CSV or Parquet file."""
    form = request.query_params.get("as", "csv")
    if form not in FORMATS:
        return Response(f"unknown format {form!r}; use csv or parquet", 400, media_type="text/plain")
    caller, sql = caller_of(request), request.query_params.get("sql", "")
    if may_query(caller.visitor) and not is_own(caller, request.query_params.get("proof", "")):
        return Response(UNPROVEN, 403, media_type="text/plain")
    try:
        body = await query_lake_as_file(caller, sql, DOWNLOAD_MAX, form)
    except (HistoryError, ConfigurationError) as error:
        return Response(str(error), 400, media_type="text/plain; charset=utf-8")
    headers = {"Content-Disposition": f'attachment; filename="umbel-history.{form}"'}
    return Response(body, media_type=FORMATS[form][0], headers=headers)


def _wanted(given: Mapping[str, str]) -> AttemptFilter:
    return AttemptFilter(
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
