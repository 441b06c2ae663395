"""Space-time diagram: what happened to a task, one lane per process, time downwards.

A row is an event: a dot on the lane of its process, the Lamport clock next to it, a description at the right.
An arrow says which event had to happen before which other event. Rows are evenly spaced, because the order is
certain and the time between the clocks of two machines is not.

Four kinds of process take part: the client that sent the task, the broker that stored it, the worker that
received it, the child that ran it. The broker sends no events, so its dots are inferred from the events of
the others, and have no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbel.history.markup import Markup, circle, drawing, duration, line, rect, shortened, tag, text, titled
from umbel.monitor.records import Happening, StoryEvent
from umbel.web.pages.labels import clock_time

# ---- drawing ---------------------------------------------------------------------------------------

ROW, TOP, LANE, LEFT, WORDS = 40.0, 66.0, 84.0, 48.0, 380.0
NAME_MAX = 13
WORDS_MAX = 52
ROWS_MAX = 200
DESCRIBED_MAX = 40


@dataclass(frozen=True, slots=True)
class Lane:
    """A vertical line for one process. `node` is the worker that it is, or the worker whose child it is."""

    kind: str  # client, broker, worker, child
    name: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """One event on a lane. `run` counts the task's runs from 0; `tone` is a class of the style sheet."""

    lane: Lane
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
    runs: tuple[tuple[Lane, int, int], ...] = ()
    """The lane, the first and the last dot of each time the task ran."""


def spacetime(story: Story) -> Markup:
    """Return the diagram; a repeat is drawn with another stroke, and with its cause."""
    dots, x = story.dots[:ROWS_MAX], {lane: LEFT + LANE * place for place, lane in enumerate(story.lanes)}
    edge = LEFT + LANE * len(story.lanes)
    width, height = edge + WORDS, TOP + ROW * len(dots) + 6
    places = [(x[dot.lane], TOP + ROW * (row + 0.5)) for row, dot in enumerate(dots)]
    hops = [hop for hop in story.hops if max(hop.before, hop.after) < len(dots)]
    from_right = {hop.after for hop in hops if places[hop.before][0] > places[hop.after][0]}
    described = (f"{dot.lane.kind} {dot.lane.name}: {dot.words}" for dot in dots[:DESCRIBED_MAX])
    return drawing(
        width,
        height,
        "Space-time diagram",
        tag("desc", "; ".join(described)),
        [rect(0.0, TOP + ROW * row, width, ROW, class_="stripe") for row in range(1, len(dots), 2)],
        [_lane(lane, x[lane], height) for lane in story.lanes],
        [
            line(x[lane], places[first][1], x[lane], places[last][1], class_=_run_class(dots[first]))
            for lane, first, last in story.runs
            if last < len(dots)
        ],
        [_arrow(places[hop.before], places[hop.after], again=hop.again) for hop in hops],
        [_dot(dot, *places[row], from_right=row in from_right) for row, dot in enumerate(dots)],
        [_words(dot, edge, places[row][1]) for row, dot in enumerate(dots)],
        label="Space-time diagram: the events of this task, one lane per process",
        width=width,
        height=height,
        class_="spacetime",
    )


def _lane(lane: Lane, x: float, height: float) -> Markup:
    return titled(
        f"{lane.kind} {lane.name}",
        text(lane.kind, x, 24, "middle", class_="soft-text"),
        text(shortened(lane.name, NAME_MAX), x, 41, "middle"),
        line(x, 54.0, x, height, class_="lane-line"),
    )


def _run_class(first: Dot) -> str:
    return "lane-line run again" if first.run else "lane-line run"


def _arrow(start: tuple[float, float], end: tuple[float, float], *, again: bool) -> Markup:
    (x1, y1), (x2, y2) = start, end
    kind = " again" if again else ""
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1.0)
    across, down = (x2 - x1) / length, (y2 - y1) / length
    tip, foot = (x2 - across * 8, y2 - down * 8), (x2 - across * 17, y2 - down * 17)
    head = (
        f"M{tip[0]:.1f} {tip[1]:.1f}L{foot[0] - down * 4:.1f} {foot[1] + across * 4:.1f}"
        f"L{foot[0] + down * 4:.1f} {foot[1] - across * 4:.1f}z"
    )
    shaft = f"M{x1:.1f} {y1:.1f}L{foot[0]:.1f} {foot[1]:.1f}"
    return tag("g", tag("path", d=shaft, class_=f"hop{kind}"), tag("path", d=head, class_=f"hop-head{kind}"))


def _dot(dot: Dot, x: float, y: float, *, from_right: bool) -> Markup:
    """Return a dot with its clock on the side where no arrow arrives."""
    label, clock = dot.words, None
    if dot.clock is not None:
        label += f", clock {dot.clock}"
        side, anchor = (x - 10, "end") if from_right else (x + 10, "start")
        clock = text(str(dot.clock), side, y - 6, anchor, class_="mono soft-text halo-text")
    kind = dot.tone or ("again" if dot.run else "")
    return titled(label, circle(x, y, 6.0, class_=f"dot {kind}"), clock)


def _words(dot: Dot, x: float, y: float) -> Markup:
    return titled(
        dot.words,
        text(shortened(dot.words, WORDS_MAX), x, y - 2),
        text(dot.at, x, y + 14, class_="soft-text mono"),
        text(dot.cause, x, y + 14, class_="cause") if dot.cause else None,
    )


# ---- story -----------------------------------------------------------------------------------------

ENDINGS = {"task-succeeded": "good", "task-failed": "bad", "task-retried": "", "task-revoked": "idle"}
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

    Why a node did not finish the task is taken from its changes at that time, oldest first, because a node
    that has come back was lost all the same. Without such a change the node's present state in `nodes` is
    used.
    """
    builder = _StoryBuilder(Lane("broker", queue) if queue else BROKER, nodes or {}, happened)
    for event in events:
        builder.take(event)
    return builder.story()


class _StoryBuilder:
    """Builds a story from events, one at a time.

    The broker's dots are inferred: between a sending and a receipt it stored the message, and before a
    receipt that is not the first it redelivered the message.
    """

    def __init__(self, broker: Lane, nodes: Mapping[str, str], happened: Sequence[Happening]) -> None:
        self._broker = broker
        self._nodes = nodes
        self._happened = happened
        self._dots: list[Dot] = []
        self._hops: list[Hop] = []
        self._runs: list[tuple[Lane, int, int]] = []
        self._running: dict[str, tuple[Lane, int]] = {}  # by node: the child's lane, and the dot of the start
        self._received: dict[
            str, tuple[int, float]
        ] = {}  # by node: the dot of the last receipt, and its time
        self._stored: int | None = None  # the broker's dot for the waiting message
        self._run = 0
        self._first_at: float | None = None
        self._pids: dict[str, int] = {}

    def take(self, event: StoryEvent) -> None:
        self._run = max(self._run, event.delivery - 1, event.attempt or 0)
        match event.type:
            case "task-sent":
                self._take_sent(event)
            case "task-received":
                self._take_received(event)
            case "task-started":
                self._take_started(event)
            case _:
                self._take_other(event)

    def story(self) -> Story:
        lanes = list(dict.fromkeys(dot.lane for dot in self._dots))
        nodes = list(dict.fromkeys(lane.node for lane in lanes))
        lanes.sort(key=lambda lane: (_KINDS[lane.kind], nodes.index(lane.node), lane.kind == "child"))
        last = len(self._dots) - 1
        runs = [*self._runs, *((lane, first, last) for lane, first in self._running.values())]
        return Story(tuple(lanes), tuple(self._dots), tuple(self._hops), tuple(runs))

    def _take_sent(self, event: StoryEvent) -> None:
        # The worker itself sends the next attempt of a task that it received.
        lane = _worker(event.node) if event.node in self._received else _client(event)
        self._store(self._add(lane, event), "waits in the queue")

    def _take_received(self, event: StoryEvent) -> None:
        before = self._stored
        if event.repeat == REDELIVERED and self._received:
            node = max(self._received, key=lambda name: self._received[name])
            before = self._add_of_broker("redelivered", self._cause(node, event.at))
            self._hops.append(Hop(self._received[node][0], before, again=True))
            self._interrupt(before)
        elif before is None:
            # Without a `task-sent` event, which is Celery's default.
            before = self._add_of_broker("waits in the queue; no event of its sending")
        self._pids.setdefault(event.node, event.pid)
        place = self._add(_worker(event.node), event)
        self._hops.append(Hop(before, place, again=bool(event.repeat)))
        self._received[event.node] = place, event.at

    def _cause(self, node: str, again_at: float) -> str:
        end, received_at = self._nodes.get(node, ""), self._received[node][1]
        for change in self._happened:
            if change.node == node and change.kind in ("lost", "left") and change.at >= received_at:
                end = change.kind if change.at <= again_at + FOUND_WITHIN_S else ""
                break
        return f"redelivered: {node} {ENDS.get(end, 'did not finish it')}"

    def _interrupt(self, place: int) -> None:
        """End the runs whose message was redelivered: no event will report their end."""
        self._runs += [(lane, first, place) for lane, first in self._running.values()]
        self._running.clear()

    def _take_started(self, event: StoryEvent) -> None:
        known = self._pids.get(event.node)
        name = f"of {event.node.partition('@')[0]}" if known in {None, event.pid} else f"pid {event.pid}"
        lane = Lane("child", name, event.node)
        place = self._add(lane, event)
        if event.node in self._received:
            self._hops.append(Hop(self._received[event.node][0], place, again=self._run > 0))
        self._running[event.node] = lane, place

    def _take_other(self, event: StoryEvent) -> None:
        lane = _client(event) if event.process.startswith("client ") else _worker(event.node)
        place = self._add(lane, event)
        if (started := self._running.get(event.node)) is not None:
            if event.type in ENDINGS:
                self._runs.append((*self._running.pop(event.node), place))
            self._hops.append(Hop(started[1], place, again=self._run > 0))
        elif event.node in self._received:
            self._hops.append(Hop(self._received[event.node][0], place))
        if event.type == "task-retried":
            self._store(place, "waits for the next attempt")

    def _store(self, sender: int, words: str) -> None:
        self._stored = self._add_of_broker(words)
        self._hops.append(Hop(sender, self._stored, again=self._run > 0))

    def _add_of_broker(self, words: str, cause: str = "") -> int:
        self._dots.append(Dot(self._broker, words, run=self._run, cause=cause))
        return len(self._dots) - 1

    def _add(self, lane: Lane, event: StoryEvent) -> int:
        if self._first_at is None:
            self._first_at = event.at
        after = event.at - self._first_at
        at = clock_time(event.at) + (f" +{duration(after)}" if after > 0 else "")
        tone = ENDINGS.get(event.type, "")
        self._dots.append(Dot(lane, _event_words(event), event.clock or None, at, self._run, tone))
        return len(self._dots) - 1


def _event_words(event: StoryEvent) -> str:
    words = EVENT_WORDS.get(event.type, event.type.removeprefix("task-"))
    if not event.detail or event.type in WITHOUT_DETAIL:
        return words
    return f"{words} to {event.detail}" if event.type == "task-sent" else f"{words}: {event.detail}"


def _client(event: StoryEvent) -> Lane:
    return Lane("client", event.process.removeprefix("client "))


def _worker(node: str) -> Lane:
    return Lane("worker", node, node)
