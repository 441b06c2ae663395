"""Frame: how a page is rendered, and the static files. Templates escape everything; markup comes from the
drawings alone.

Text from outside may hold control characters, so each value is written as one line of printable text. A
request with `?part=NAME`, or several joined by commas, gets these blocks of the page alone: this is how live
parts are replaced. The static files are few and small: they are read once, served from memory, and named with
the version so that browsers cache them.
"""

import gzip
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from mimetypes import guess_type
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jinja2
import markupsafe
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from umbel.errors import BrokerError
from umbel.history.charts import count, duration, percent, rate
from umbel.text import lines, one_line
from umbel.version import VERSION
from umbel.web.actions import ROLES
from umbel.web.pages import labels
from umbel.web.pages.labels import ago, clock_time, instant, iso, local
from umbel.web.problems import Refused
from umbel.web.site import path_to, site_of, visitor_of

# ---- frame -----------------------------------------------------------------------------------------
#
# How a page is rendered. Templates escape everything; markup comes from the drawings alone.
#
# Text from outside may hold control characters, so each value is written as one line of printable text. A
# request with `?part=NAME`, or several joined by commas, gets these blocks of the page alone: this is how
# live parts are replaced.

HERE = Path(__file__).parent
CUT = 160
_IDENTITY = re.compile(r"(.+)\.\d+\.\d+")

NAVIGATION: Sequence[tuple[str, str, str]] = (
    ("/", "Overview", "pulse"),
    ("/cluster", "Cluster", "ring"),
    ("/tasks", "Tasks", "list"),
    ("/queues", "Queues", "layers"),
    ("/failures", "Failures", "alert"),
    ("/schedule", "Schedule", "calendar"),
    ("/elections", "Elections", "crown"),
    ("/history", "History", "history"),
    ("/audit", "Audit", "book"),
)

_ROLES = {str(kind.__struct_config__.tag): role for kind, role in ROLES.items()}
"""By the action's name, the role it needs."""


def render(request: Request, template: str, *, status: int = 200, **data: Any) -> Response:
    """Return a whole page, or the parts of it that the request names."""
    found = _TEMPLATES.get_template(template)
    context = found.new_context(_frame(request) | data)
    parts = dict.fromkeys(request.query_params.get("part", "").split(","))
    if all(part in found.blocks or part in _BLOCKS_OF_ALL for part in parts):
        blocks = [
            found.blocks.get(part) or _TEMPLATES.get_template("page.html").blocks[part] for part in parts
        ]
        text = "".join("".join(block(context)) for block in blocks)
        return HTMLResponse(text, headers={"Cache-Control": "no-store"})
    return HTMLResponse(
        "".join(found.root_render_func(context)), status_code=status, headers={"Cache-Control": "no-store"}
    )


def missing(request: Request, title: str, why: str, status: int = 404) -> Response:
    """Return a page that says what does not exist, and why."""
    return render(request, "missing.html", status=status, title=title, why=why)


Handler = Callable[[Request], Awaitable[Response]]


def shown(handler: Handler) -> Handler:
    """Return the handler with errors shown as pages, instead of as problem documents."""

    async def show(request: Request) -> Response:
        try:
            return await handler(request)
        except BrokerError as error:
            return missing(request, "The broker does not answer", str(error), 503)
        except Refused as refused:
            return missing(request, refused.problem.title, refused.problem.detail, refused.problem.status)

    return show


def fragment(
    request: Request, template: str, *, headers: Mapping[str, str] | None = None, **data: Any
) -> Response:
    """Return a piece of HTML that is inserted into an open page."""
    found = _TEMPLATES.get_template(template)
    return HTMLResponse(found.render(_frame(request) | data), headers=dict(headers or {}))


WHY_NOT = {
    "token": "This token is not valid, was used before, or has expired. After many wrong ones wait a minute.",
    "late": "The login took longer than ten minutes, or was started in another browser. Try again.",
    "denied": "The identity provider refused the login.",
    "provider": "The identity provider failed to answer. The audit says why; try again, or use a token.",
    "role": "None of your groups at the provider has a role here. Ask the people who run this dashboard.",
    "many": "Too many logins from your address have failed. Wait a minute.",
}
OTHER_REASON = "The login failed. The audit says why."


def render_login(
    request: Request, *, failed: str = "", provider: tuple[str, str] | None = None, entered: str = ""
) -> Response:
    """Return the login page, which needs no visitor.

    `failed`: a key of WHY_NOT. `provider`: the issuer and the path where its login begins. `entered`: the
    page that is opened after a login at the provider.
    """
    found = _TEMPLATES.get_template("login.html")
    page = found.render(
        static=path_to(request, "/static"),
        session=path_to(request, "/session"),
        why_not=WHY_NOT.get(failed, OTHER_REASON) if failed else "",
        provider=urlsplit(provider[0]).netloc if provider else "",
        begin=path_to(request, provider[1]) if provider else "",
        entered=entered,
    )
    return HTMLResponse(page, headers={"Cache-Control": "no-store"})


def query(**fields: Any) -> str:
    """Return a query string of the fields that are set, in their order."""
    given = {name: value for name, value in fields.items() if value not in {None, ""}}
    return f"?{urlencode(given)}" if given else ""


def _frame(request: Request) -> dict[str, Any]:
    site, visitor = site_of(request), visitor_of(request)
    return {
        "request": request,
        "site": site,
        "visitor": visitor,
        "sessions": len(request.scope["umbel.sessions"]()),
        "health": site.health,
        "to": lambda path, **fields: path_to(request, path) + query(**fields),
        "here": request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
        "may": lambda action: visitor.role.may(_ROLES[action]),
        "version": VERSION,
    }


def _plain(value: Any) -> Any:
    """Return what a template writes: markup unchanged, everything else as one printable line."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else one_line(str(value))


def _lines(text: str) -> markupsafe.Markup:
    return markupsafe.escape(lines(text))


def _short(text: Any, most: int = CUT) -> str:
    plain = one_line("" if text is None else str(text))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def _node(identity: str) -> str:
    """Return the node of an identity that also names its process and incarnation."""
    found = _IDENTITY.fullmatch(identity)
    return identity if found is None else found[1]


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        auto_reload=False,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        ago=ago,
        clock_time=clock_time,
        count=count,
        duration=duration,
        instant=instant,
        iso=iso,
        lines=_lines,
        local=local,
        node=_node,
        part=lambda text: quote(str(text), safe=""),
        percent=percent,
        rate=rate,
        short=_short,
    )
    made.globals.update(icon=labels.icon, look=labels.look, state=labels.state, navigation=NAVIGATION)
    # A part is rendered without the lines above its block, so every template has the macros anyway.
    macros = made.get_template("macros.html").module
    made.globals.update({name: getattr(macros, name) for name in ("act", "chart", "empty", "when")})
    return made


_TEMPLATES = _environment()
_BLOCKS_OF_ALL = frozenset({"health"})


# ---- static files ----------------------------------------------------------------------------------
#
# Read once, served from memory, compressed for who takes it.
#
# There are some ten of them, all small, and they change with the version alone: so pages name them with it
# and browsers keep them.

KEPT = "public, max-age=86400"
COMPRESSED = {".js", ".css", ".svg"}
TYPES = {".js": "text/javascript", ".LICENSE": "text/plain"}


class Files:
    """An ASGI application that serves the files below one folder, by their exact names."""

    def __init__(self, folder: Path) -> None:
        self._plain = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self._packed = {
            name: gzip.compress(body, mtime=0)
            for name, body in self._plain.items()
            if Path(name).suffix in COMPRESSED
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        name = request.scope["path"].removeprefix(request.scope.get("root_path", "")).lstrip("/")
        body = self._plain.get(name)
        if body is None or request.method not in {"GET", "HEAD"}:
            return PlainTextResponse("no such file", 404)
        headers = {"Cache-Control": KEPT, "Vary": "Accept-Encoding"}
        suffix = Path(name).suffix
        kind = TYPES.get(suffix) or guess_type(name)[0] or "application/octet-stream"
        if name in self._packed and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(
                self._packed[name], media_type=kind, headers=headers | {"Content-Encoding": "gzip"}
            )
        return Response(body, media_type=kind, headers=headers)
