"""Ticks: where in a period something changed, as a strip above the time slider.

A change that is worse stands higher, so that colour says nothing alone; of those that fall on one place the
worst is drawn. The list beside the strip says all of them in words.
"""

from collections.abc import Sequence

from umbel.history.markup import Markup, tag
from umbel.monitor.shapes import Happening
from umbel.web.pages.times import instant

PLACES = 180
HEIGHT = 20.0
WIDTH = 4.0  # of a place
TONES = {"lost": ("bad", 1.0), "suspect": ("warn", 0.8), "left": ("idle", 0.6)}
USUAL = ("good", 0.45)
LEADS = ("leads", 0.45)


def ticks(
    happened: Sequence[Happening], since: float, until: float, gap: tuple[float, float] | None = None
) -> Markup:
    """`gap`: the time of which nothing is known."""
    length = max(until - since, 1.0)
    places: dict[int, list[Happening]] = {}
    for one in happened:
        place = int((one.at - since) / length * PLACES)
        places.setdefault(min(PLACES - 1, max(0, place)), []).append(one)
    return tag(
        "svg",
        None if gap is None else _gap(*((one - since) / length for one in gap)),
        [_tick(place, there) for place, there in sorted(places.items())],
        viewBox=f"0 0 {PLACES * WIDTH:g} {HEIGHT:g}",
        preserveAspectRatio="none",
        class_="ticks",
        aria_hidden="true",
    )


def _gap(first: float, last: float) -> Markup:
    whole = PLACES * WIDTH
    return tag(
        "rect",
        tag("title", "not known"),
        x=f"{first * whole:.1f}",
        y=0,
        width=f"{(last - first) * whole:.1f}",
        height=HEIGHT,
        class_="tick gap",
    )


def _tick(place: int, there: Sequence[Happening]) -> Markup:
    tone, share = max((_tone(one) for one in there), key=lambda one: one[1])
    high = HEIGHT * share
    more = f" and {len(there) - 1} more" if len(there) > 1 else ""
    return tag(
        "rect",
        tag("title", f"{instant(there[0].at)}: {there[0].subject[:80]} {there[0].kind}{more}"),
        x=place * WIDTH + 0.75,
        y=HEIGHT - high,
        width=WIDTH - 1.5,
        height=high,
        class_=f"tick {tone}",
    )


def _tone(one: Happening) -> tuple[str, float]:
    return TONES.get(one.kind) or (LEADS if one.kind in ("lease", "elected") else USUAL)
