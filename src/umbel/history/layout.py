"""Layout: the parts that the report's page is put together from: sections, figures, tables."""

from collections.abc import Collection, Sequence

from umbel.history.markup import Content, Markup, joined, tag


def section(title: str, *content: Content) -> Markup:
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title), content, id=name)


def figure(said: str, drawn: Markup, listed: Markup) -> Markup:
    return joined(tag("figure", tag("figcaption", said), drawn, tabindex=0), listed)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    *,
    numbers: Collection[int] = (),
    whole: Collection[int] = (),
    id_: str | None = None,
) -> Markup:
    """The places of the columns that hold numbers, and of those that are not to be broken into lines."""

    def kind(place: int) -> str | None:
        return "number" if place in numbers else "whole" if place in whole else None

    head = tag(
        "tr", [tag("th", name, scope="col", class_=kind(place)) for place, name in enumerate(headings)]
    )
    body = [
        tag("tr", [tag("td", value, class_=kind(place)) for place, value in enumerate(row)]) for row in rows
    ]
    listed = tag("table", tag("thead", head), tag("tbody", body), id=id_)
    # On a narrow screen it is scrolled, also by keyboard.
    return tag("div", listed, class_="wide", tabindex=0, role="group", aria_label="Table; scroll sideways")


def nothing(said: str) -> Markup:
    return tag("p", said, class_="nothing")
