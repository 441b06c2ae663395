"""Markup: HTML and SVG as values, so that what came from outside can never become markup.

Names of tasks, arguments and errors are whatever somebody wrote, `</script>` included. Here text is
escaped unless it is `Markup`, and only `tag` makes that: to forget to escape is not possible. The
page needs no more than this, so it takes no template library.
"""

from collections.abc import Sequence
from html import escape
from typing import TypeAlias

from umbel.text import one_line

VOID = frozenset({"meta", "br", "hr", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that is markup already, for templates too (`__html__`)."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


Content: TypeAlias = "Markup | str | int | float | Sequence[Content] | None"


def tag(name: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """One element. An attribute that is None is left out; `class_` and `stroke_width` as in HTML."""
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(one_line(_number(value)), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not content:
        return Markup(f"<{name}{spelled}/>")
    return Markup(f"<{name}{spelled}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    return Markup("".join(map(_rendered, content)))


def _rendered(content: Content) -> str:
    match content:
        case None:
            return ""
        case Markup():
            return content
        case str() | int() | float():
            return escape(one_line(str(content)), quote=True)
        case _:
            return "".join(map(_rendered, content))


def _number(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
