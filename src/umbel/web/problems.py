"""Problems: what went wrong, as RFC 9457 problem documents."""

from typing import Any

import msgspec
from starlette.responses import Response

CONTENT_TYPE = "application/problem+json"


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`type` is `about:blank` where the status says all."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class Refused(Exception):
    """A request that is answered with a problem."""

    def __init__(self, status: int, title: str, detail: str = "", **headers: str) -> None:
        super().__init__(detail or title)
        self.problem = Problem(title=title, status=status, detail=detail)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Forbidden(Refused):
    def __init__(self, detail: str) -> None:
        super().__init__(403, "Forbidden", detail)


def answer(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(problem), problem.status, headers, media_type=CONTENT_TYPE)


def as_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=str), status, media_type="application/json")
