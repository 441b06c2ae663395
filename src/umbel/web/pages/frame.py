"""Frame: how a page is rendered. Templates escape everything; markup comes from the drawings alone.

What came from outside may hold characters that a screen obeys instead of showing them, so each value is
written as one line of printable text. A request with `?part=NAME`, or several joined by commas, gets
these blocks of the page alone: this is how live parts are replaced.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import markupsafe
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from umbel.errors import BrokerError
from umbel.history.scales import count, duration, percent, rate
from umbel.text import lines, one_line
from umbel.version import VERSION
from umbel.web.actions import ROLES
from umbel.web.pages.drawing import icons
from umbel.web.pages.times import ago, clock_time, instant, iso, local
from umbel.web.problems import Refused
from umbel.web.site import path_to, site_of, visitor_of

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
    """A whole page, or the parts of it that were asked for."""
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
    """A page that says what is not there, and why."""
    return render(request, "missing.html", status=status, title=title, why=why)


Handler = Callable[[Request], Awaitable[Response]]


def shown(handler: Handler) -> Handler:
    """The same page; what it cannot show is said on a page too, instead of as a document for programs."""

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
    """A piece that goes into a page that is open."""
    found = _TEMPLATES.get_template(template)
    return HTMLResponse(found.render(_frame(request) | data), headers=dict(headers or {}))


def render_login(request: Request, *, failed: bool) -> Response:
    """The one page without a visitor."""
    found = _TEMPLATES.get_template("login.html")
    page = found.render(
        static=path_to(request, "/static"), session=path_to(request, "/session"), failed=failed
    )
    return HTMLResponse(page, headers={"Cache-Control": "no-store"})


def query(**fields: Any) -> str:
    """A query string of what is set, in its order."""
    given = {name: value for name, value in fields.items() if value not in {None, ""}}
    return f"?{urlencode(given)}" if given else ""


def _frame(request: Request) -> dict[str, Any]:
    site, visitor = site_of(request), visitor_of(request)
    return {
        "request": request,
        "site": site,
        "visitor": visitor,
        "health": site.health,
        "to": lambda path, **fields: path_to(request, path) + query(**fields),
        "here": request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
        "may": lambda action: visitor.role.may(_ROLES[action]),
        "version": VERSION,
    }


def _plain(value: Any) -> Any:
    """What a template writes: markup as it is, everything else as one printable line."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else one_line(str(value))


def _lines(text: str) -> markupsafe.Markup:
    return markupsafe.escape(lines(text))


def _short(text: Any, most: int = CUT) -> str:
    plain = one_line("" if text is None else str(text))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def _node(identity: str) -> str:
    """The node of an identity that also names its process and incarnation, as elections have it."""
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
    made.globals.update(icon=icons.icon, look=icons.look, state=icons.state, navigation=NAVIGATION)
    # A part is rendered without the lines above its block, so every template has the macros anyway.
    macros = made.get_template("macros.html").module
    made.globals.update({name: getattr(macros, name) for name in ("act", "chart", "empty", "when")})
    return made


_TEMPLATES = _environment()
_BLOCKS_OF_ALL = frozenset({"health"})
