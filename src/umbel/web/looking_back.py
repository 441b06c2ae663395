"""Looking back: questions to the lake's tables, for the history page and the API.

They run in threads, a few at a time, and each has a limit of time and of rows: whoever looks back must
not keep others from looking at now.

Texts are redacted like everywhere, but a query can take a text to pieces that no pattern knows. So
free queries are for operators; a viewer sees the figures.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import ceil, floor
from typing import Any, TypeVar

from umbel.history.query import Answer, Tables, read, require_duckdb
from umbel.web.recorded import Recorded, recorded
from umbel.web.redaction import redact_data
from umbel.web.roles import Role
from umbel.web.site import Site, Visitor

ROWS_MAX = 1000
TIMEOUT_S = 10.0
MINUTE_S = 60
ResultT = TypeVar("ResultT")


async def look_back(site: Site, work: Callable[[Tables], ResultT]) -> ResultT:
    """Raises `HistoryError` for what cannot be answered, `ConfigurationError` for what is not installed."""
    require_duckdb()
    async with site.looking_back:
        return await asyncio.to_thread(read, site.lake, work, timeout_s=TIMEOUT_S)


async def recorded_between(site: Site, since: float, until: float) -> Recorded:
    """Who came, went and was elected then, in whole minutes: what ends now is read once a minute."""
    first, last = floor(since / MINUTE_S) * MINUTE_S, ceil(until / MINUTE_S) * MINUTE_S

    def asked() -> Awaitable[Recorded]:
        return look_back(site, lambda tables: recorded(tables, first, last))

    return await site.recollection.recall(first, last, asked)


def may_query(visitor: Visitor) -> bool:
    return visitor.role.may(Role.OPERATOR)


def query(tables: Tables, sql: str, limit: int) -> Answer:
    found = tables.ask(sql, limit=limit, timeout_s=TIMEOUT_S)
    return replace(found, rows=[tuple(map(_redacted, row)) for row in found.rows])


def _redacted(value: Any) -> Any:
    return redact_data(value) if isinstance(value, str | list | dict) else value
