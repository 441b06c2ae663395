"""Space-time diagram: what happened to a task, one lane for each process, time downwards.

A row is an event: a dot on the lane of its process, the Lamport clock next to it, the words at the right.
Arrows say which event had to happen before which. Four kinds of process take part: the client that sent the
task, the broker that stored it, the worker that received it, the child that ran it. The broker reports no
events, so its dots are inferred from those of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbel.history.charts import Markup, duration, tag
from umbel.monitor.records import Happening, StoryEvent
from umbel.web.pages.labels import clock_time

# ---- space-time diagram ----------------------------------------------------------------------------
#
# What happened to a task, one lane per process, time downwards.
#
# A row is an event: its dot stands on the lane of the process that it happened in, beside it the Lamport
# clock, at the right the words. An arrow says that one event had to happen before the other: a process
# knows its own past (its lane), and what a message brought it. A repeat is drawn in another stroke, with
# its cause. Rows are evenly spaced: the order is what is certain, the time between two machines' clocks is
# not.

ROW, TOP, LANE, LEFT, WORDS = 40.0, 66.0, 84.0, 48.0, 380.0
NAME_MAX = 13
WORDS_MAX = 52
ROWS_MAX = 200


@dataclass(frozen=True, slots=True)
class Lane:
    """A vertical line for one process."""

    kind: str  # client, broker, worker, child
    name: str
    node: str = ""
    """The worker that the lane belongs to, or whose child it is."""


@dataclass(frozen=True, slots=True)
class Dot:
    """One event on a lane. `run` counts the task's runs from 0; `tone` is a class of the style sheet."""

    lane: int
    words: str
    clock: int | None = None
    at: str = ""
    run: int = 0
    tone: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """An arrow: the dot at `before` happened before the dot at `after`."""

    before: int
    after: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that the diagram draws."""

    lanes: tuple[Lane, ...]
    dots: tuple[Dot, ...]
    hops: tuple[Hop, ...]
    runs: tuple[tuple[int, int, int], ...] = ()
    """(lane, first dot, last dot) of each time the task ran."""


def spacetime(story: Story) -> Markup:
    """Return the diagram.

    Rows are evenly spaced: the order is certain, the time between the clocks of two machines is not. A repeat
    is drawn in another stroke, with its cause.
    """
    dots = story.dots[:ROWS_MAX]
    edge = LEFT + LANE * len(story.lanes)
    width, height = edge + WORDS, TOP + ROW * len(dots) + 6
    hops = [hop for hop in story.hops if max(hop.before, hop.after) < len(dots)]
    from_right = {hop.after for hop in hops if dots[hop.before].lane > dots[hop.after].lane}
    description = "; ".join(
        f"{story.lanes[dot.lane].kind} {story.lanes[dot.lane].name}: {dot.words}" for dot in dots[:40]
    )
    return tag(
        "svg",
        tag("title", "Space-time diagram"),
        tag("desc", description),
        [_stripe(place, width) for place in range(1, len(dots), 2)],
        [_lane(place, lane, height) for place, lane in enumerate(story.lanes)],
        [_run(dots, *run) for run in story.runs if run[2] < len(dots)],
        [_hop(dots, hop) for hop in hops],
        [_dot(place, dot, from_right=place in from_right) for place, dot in enumerate(dots)],
        [_words(place, dot, edge) for place, dot in enumerate(dots)],
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        class_="spacetime",
        role="img",
        aria_label="Space-time diagram: the events of this task, one lane per process",
    )


def _x(lane: int) -> float:
    return LEFT + LANE * lane


def _y(place: int) -> float:
    return TOP + ROW * (place + 0.5)


def _stripe(place: int, width: float) -> Markup:
    return tag("rect", x=0.0, y=TOP + ROW * place, width=width, height=ROW, class_="stripe")


def _lane(place: int, lane: Lane, height: float) -> Markup:
    x = _x(place)
    name = lane.name if len(lane.name) <= NAME_MAX else f"{lane.name[: NAME_MAX - 1]}…"
    return tag(
        "g",
        tag("title", f"{lane.kind} {lane.name}"),
        tag("text", lane.kind, x=x, y=24, text_anchor="middle", class_="soft-text"),
        tag("text", name, x=x, y=41, text_anchor="middle"),
        tag("line", x1=x, y1=54.0, x2=x, y2=height, class_="lane-line"),
    )


def _run(dots: Sequence[Dot], lane: int, first: int, last: int) -> Markup:
    again = " again" if dots[first].run else ""
    return tag("line", x1=_x(lane), y1=_y(first), x2=_x(lane), y2=_y(last), class_=f"lane-line run{again}")


def _hop(dots: Sequence[Dot], hop: Hop) -> Markup:
    x1, y1, x2, y2 = _x(dots[hop.before].lane), _y(hop.before), _x(dots[hop.after].lane), _y(hop.after)
    again = " again" if hop.again else ""
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1.0)
    across, down = (x2 - x1) / length, (y2 - y1) / length
    tip, foot = (x2 - across * 8, y2 - down * 8), (x2 - across * 17, y2 - down * 17)
    head = (
        f"M{tip[0]:.1f} {tip[1]:.1f}L{foot[0] - down * 4:.1f} {foot[1] + across * 4:.1f}"
        f"L{foot[0] + down * 4:.1f} {foot[1] - across * 4:.1f}z"
    )
    return tag(
        "g",
        tag("path", d=f"M{x1:.1f} {y1:.1f}L{foot[0]:.1f} {foot[1]:.1f}", class_=f"hop{again}"),
        tag("path", d=head, class_=f"hop-head{again}"),
    )


def _dot(place: int, dot: Dot, *, from_right: bool) -> Markup:
    """Return a dot with its clock on the side where no arrow arrives."""
    x, y = _x(dot.lane), _y(place)
    clock = (
        None
        if dot.clock is None
        else tag(
            "text",
            str(dot.clock),
            x=x - 10 if from_right else x + 10,
            y=y - 6,
            text_anchor="end" if from_right else "start",
            class_="mono soft-text halo-text",
        )
    )
    kind = dot.tone or ("again" if dot.run else "")
    return tag(
        "g",
        tag("title", f"{dot.words}" + (f", clock {dot.clock}" if dot.clock is not None else "")),
        tag("circle", cx=x, cy=y, r=6.0, class_=f"dot {kind}"),
        clock,
    )


def _words(place: int, dot: Dot, edge: float) -> Markup:
    y = _y(place)
    words = dot.words if len(dot.words) <= WORDS_MAX else f"{dot.words[: WORDS_MAX - 1]}…"
    under = " · ".join(filter(None, (dot.at,)))
    lines = [
        tag("text", words, x=edge, y=y - 2),
        tag("text", under, x=edge, y=y + 14, class_="soft-text mono"),
    ]
    if dot.cause:
        lines.append(tag("text", dot.cause, x=edge, y=y + 14, class_="cause"))
    return tag("g", tag("title", dot.words), lines)


# ---- telling ---------------------------------------------------------------------------------------
#
# The events of a task as lanes, dots and hops for the space-time diagram.
#
# Four kinds of process take part: the client that sent it, the broker that keeps it, the worker that
# received it, the child that ran it. The broker sends no events, so what it did is read from
# its neighbours: between a sending and a receipt it held the message, and before a receipt that is not the
# first it delivered it again. Those dots have no clock.

ENDINGS = {"task-succeeded": "good", "task-failed": "bad", "task-retried": "", "task-revoked": "idle"}
IN_CHILD = "task-started"
REDELIVERED = "redelivered"
WITHOUT_DETAIL = frozenset({"task-received", "task-started"})
BROKER = Lane("broker", "queue")
ENDS = {"lost": "was lost", "left": "left", "suspect": "is silent"}  # of a node, as a phrase
FOUND_WITHIN_S = 30.0  # a message may be redelivered before its node is declared lost
_KINDS = {"client": 0, "broker": 1, "worker": 2, "child": 2}
EVENT_WORDS = {
    "task-sent": "sent",
    "task-received": "received",
    "task-started": "started",
    "task-succeeded": "succeeded",
    "task-failed": "failed",
    "task-retried": "will be retried",
    "task-revoked": "revoked",
    "task-rejected": "rejected",
}


def story_of(
    events: Sequence[StoryEvent],
    queue: str = "",
    nodes: Mapping[str, str] | None = None,
    happened: Sequence[Happening] = (),
) -> Story:
    """Return a task's events as lanes, dots and arrows; lanes in the order client, broker, workers with their
    children.

    Why a node did not finish the task is taken from its changes at that time, oldest first: a node that has
    come back was still lost. Without such a change, its state in `nodes` now is used.
    """
    builder = _StoryBuilder(Lane("broker", queue) if queue else BROKER, nodes or {}, happened)
    for event in events:
        builder.take(event)
    return builder.story()


class _StoryBuilder:
    """Builds a story from events, one at a time.

    The broker reports no events, so its dots are inferred: between a sending and a receipt it held the
    message, and before a receipt that is not the first it redelivered it. Those dots have no clock.
    """

    def __init__(self, broker: Lane, nodes: Mapping[str, str], happened: Sequence[Happening]) -> None:
        self._broker = broker
        self._nodes = nodes
        self._happened = happened
        self._lanes: dict[Lane, None] = {}
        self._dots: list[tuple[Lane, Dot]] = []
        self._hops: list[Hop] = []
        self._runs: list[tuple[Lane, int, int]] = []
        self._running: dict[str, tuple[Lane, int]] = {}
        self._received: dict[str, int] = {}
        self._received_at: dict[str, float] = {}
        self._kept: int | None = None  # the broker's dot for the waiting message
        self._run = 0
        self._first_at: float | None = None
        self._pids: dict[str, int] = {}

    def take(self, event: StoryEvent) -> None:
        self._run = max(self._run, event.delivery - 1, event.attempt or 0)
        if event.type == "task-sent":
            self._sent(event)
        elif event.type == "task-received":
            self._was_received(event)
        elif event.type == IN_CHILD:
            self._started(event)
        else:
            self._told(event)

    def story(self) -> Story:
        places = {lane: place for place, lane in enumerate(self._ordered())}
        dots = tuple(
            Dot(places[lane], dot.words, dot.clock, dot.at, dot.run, dot.tone, dot.cause)
            for lane, dot in self._dots
        )
        runs = [*self._runs, *((lane, first, len(dots) - 1) for lane, first in self._running.values())]
        return Story(
            tuple(places),
            dots,
            tuple(self._hops),
            tuple((places[lane], first, last) for lane, first, last in runs),
        )

    def _ordered(self) -> list[Lane]:
        nodes = list(dict.fromkeys(lane.node for lane in self._lanes))
        return sorted(
            self._lanes, key=lambda lane: (_KINDS[lane.kind], nodes.index(lane.node), lane.kind == "child")
        )

    def _sent(self, event: StoryEvent) -> None:
        lane = Lane("client", event.process.removeprefix("client "))
        if event.node in self._received:  # the worker sends the next attempt itself
            lane = _worker(event.node)
        place = self._add(lane, event)
        self._keep(place, "waits in the queue")

    def _was_received(self, event: StoryEvent) -> None:
        before = self._kept
        if event.repeat == REDELIVERED and self._received:
            last = max(self._received, key=lambda node: self._received[node])
            before = self._add_plain("redelivered", cause=self._cause(last, event.at))
            self._hops.append(Hop(self._received[last], before, again=True))
            self._interrupt(before)
        self._pids.setdefault(event.node, event.pid)
        place = self._add(_worker(event.node), event)
        if before is None:
            before, place = self._held_before(event, place)
        self._hops.append(Hop(before, place, again=bool(event.repeat)))
        self._received[event.node], self._received_at[event.node] = place, event.at

    def _cause(self, node: str, again_at: float) -> str:
        end = self._nodes.get(node, "")
        for change in self._happened:
            if (
                change.node == node
                and change.kind in ("lost", "left")
                and change.at >= self._received_at[node]
            ):
                end = change.kind if change.at <= again_at + FOUND_WITHIN_S else ""
                break
        return f"redelivered: {node} {ENDS.get(end, 'did not finish it')}"

    def _interrupt(self, place: int) -> None:
        """End the runs whose message was redelivered: no event will report their end."""
        for lane, first in self._running.values():
            self._runs.append((lane, first, place))
        self._running.clear()

    def _held_before(self, event: StoryEvent, place: int) -> tuple[int, int]:
        """Add the broker's dot for a message without a `task-sent` event, which is Celery's default."""
        lane, dot = self._dots.pop()
        before = self._add_plain("waits in the queue; no event of its sending")
        self._dots.append((lane, dot))
        return before, place + 1

    def _started(self, event: StoryEvent) -> None:
        known = self._pids.get(event.node)
        name = f"of {event.node.partition('@')[0]}" if known in {None, event.pid} else f"pid {event.pid}"
        lane = Lane("child", name, event.node)
        place = self._add(lane, event)
        if (before := self._received.get(event.node)) is not None:
            self._hops.append(Hop(before, place, again=self._run > 0))
        self._running[event.node] = lane, place

    def _told(self, event: StoryEvent) -> None:
        lane = Lane("client", event.process.removeprefix("client "))
        if not event.process.startswith("client "):
            lane = _worker(event.node)
        place = self._add(lane, event)
        began = self._running.get(event.node)
        if began is not None and event.type in ENDINGS:
            self._runs.append((*self._running.pop(event.node), place))
        if began is not None:
            self._hops.append(Hop(began[1], place, again=self._run > 0))
        elif (before := self._received.get(event.node)) is not None and before != place:
            self._hops.append(Hop(before, place))
        if event.type == "task-retried":
            self._keep(place, "waits for the next attempt")

    def _keep(self, sender: int, words: str) -> None:
        self._kept = self._add_plain(words)
        self._hops.append(Hop(sender, self._kept, again=self._run > 0))

    def _add_plain(self, words: str, cause: str = "") -> int:
        self._lanes.setdefault(self._broker)
        self._dots.append((self._broker, Dot(0, words, run=self._run, cause=cause)))
        return len(self._dots) - 1

    def _add(self, lane: Lane, event: StoryEvent) -> int:
        self._lanes.setdefault(lane)
        if self._first_at is None:
            self._first_at = event.at
        after = event.at - self._first_at
        at = clock_time(event.at) + (f" +{duration(after)}" if after > 0 else "")
        dot = Dot(
            0,
            _event_words(event),
            event.clock or None,
            at,
            self._run,
            ENDINGS.get(event.type, ""),
        )
        self._dots.append((lane, dot))
        return len(self._dots) - 1


def _event_words(event: StoryEvent) -> str:
    words = EVENT_WORDS.get(event.type, event.type.removeprefix("task-"))
    if not event.detail or event.type in WITHOUT_DETAIL:
        return words
    return f"{words} to {event.detail}" if event.type == "task-sent" else f"{words}: {event.detail}"


def _worker(node: str) -> Lane:
    return Lane("worker", node, node)
