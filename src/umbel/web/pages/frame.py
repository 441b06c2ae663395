"""Frame: how a page is rendered. Templates escape everything; markup comes from the drawings alone.

Text from outside may contain control characters, so each value becomes one line of printable text. A request
with `?part=NAME`, or several names joined by commas, gets only these blocks of the page: this is how the
parts of an open page are updated.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote, urlencode, urlsplit

import jinja2
import markupsafe
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from umbel.errors import BrokerError
from umbel.history.markup import count, duration, instant, percent, rate, shortened
from umbel.text import lines, one_line
from umbel.version import VERSION
from umbel.web.actions import AnyAction
from umbel.web.http import Refused, dashboard_of, path_to, visitor_of
from umbel.web.pages import labels

HERE = Path(__file__).parent
CUT = 160
UNCACHED = {"Cache-Control": "no-store"}
_IDENTITY = re.compile(r"(.+)\.\d+\.\d+")
_ROLES = {str(kind.__struct_config__.tag): kind.role for kind in get_args(AnyAction)}
"""The role that each action needs, by the action's name."""

# ---- responses -------------------------------------------------------------------------------------

Handler = Callable[[Request], Awaitable[Response]]


def render(request: Request, template: str, *, status: int = 200, **data: Any) -> Response:
    """Return a whole page, or the parts of it that the request names."""
    found = TEMPLATES.get_template(template)
    context = found.new_context(_frame(request) | data)
    parts = dict.fromkeys(request.query_params.get("part", "").split(","))
    if all(part in found.blocks or part in _BLOCKS_OF_ALL for part in parts):
        frame = TEMPLATES.get_template("page.html")
        blocks = [found.blocks.get(part) or frame.blocks[part] for part in parts]
        return HTMLResponse("".join("".join(block(context)) for block in blocks), headers=UNCACHED)
    page = "".join(found.root_render_func(context))
    return HTMLResponse(page, status_code=status, headers=UNCACHED)


def missing(request: Request, title: str, why: str, status: int = 404) -> Response:
    """Return a page that says what does not exist, and why."""
    return render(request, "missing.html", status=status, title=title, why=why)


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
    found = TEMPLATES.get_template(template)
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
    page = TEMPLATES.get_template("login.html").render(
        static=path_to(request, "/static"),
        session=path_to(request, "/session"),
        why_not=WHY_NOT.get(failed, OTHER_REASON) if failed else "",
        provider=urlsplit(provider[0]).netloc if provider else "",
        begin=path_to(request, provider[1]) if provider else "",
        entered=entered,
    )
    return HTMLResponse(page, headers=UNCACHED)


# ---- templates -------------------------------------------------------------------------------------


def query(**fields: Any) -> str:
    """Return a query string of the fields that are set, in their order."""
    given = {name: value for name, value in fields.items() if value not in {None, ""}}
    return f"?{urlencode(given)}" if given else ""


def _frame(request: Request) -> dict[str, Any]:
    """Return what every page may use."""
    dashboard, visitor = dashboard_of(request), visitor_of(request)
    return {
        "request": request,
        "dashboard": dashboard,
        "visitor": visitor,
        "sessions": len(request.scope["umbel.sessions"]()),
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
    return shortened(one_line("" if text is None else str(text)), most)


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
        clock_time=labels.clock_time,
        count=count,
        duration=duration,
        instant=instant,
        iso=labels.iso,
        lines=_lines,
        local=labels.local,
        node=_node,
        part=lambda text: quote(str(text), safe=""),
        percent=percent,
        rate=rate,
        short=_short,
    )
    made.globals.update(icon=labels.icon, look=labels.look, state=labels.state)
    # A part is rendered without the lines above its block, so every template gets the macros here.
    macros = made.get_template("macros.html").module
    made.globals.update({name: getattr(macros, name) for name in ("act", "chart", "empty", "when")})
    return made


TEMPLATES = _environment()
_BLOCKS_OF_ALL = frozenset({"health"})
