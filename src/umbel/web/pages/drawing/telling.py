"""Telling: the events of a task as lanes, dots and hops for the space-time diagram.

Four kinds of process take part: the client that sent it, the broker that keeps it, the worker that
received it, the child that ran it. The broker reports no event of its own, so what it did is read from
its neighbours: between a sending and a receipt it held the message, and before a receipt that is not
the first it delivered it again. Those dots have no clock.
"""

from collections.abc import Mapping, Sequence

from umbel.history.scales import duration
from umbel.monitor.shapes import Happening, StoryEvent
from umbel.web.pages.drawing.spacetime import Dot, Hop, Lane, Story
from umbel.web.pages.times import clock_time

ENDINGS = {"task-succeeded": "good", "task-failed": "bad", "task-retried": "", "task-revoked": "idle"}
IN_CHILD = "task-started"
REDELIVERED = "redelivered"
WITHOUT_DETAIL = frozenset({"task-received", "task-started"})
BROKER = Lane("broker", "queue")
ENDS = {"lost": "was lost", "left": "left", "suspect": "is silent"}  # of a node, in words
FOUND_WITHIN_S = 30.0  # a message may be delivered again before its node is known to be lost
_KINDS = {"client": 0, "broker": 1, "worker": 2, "child": 2}
WORDS = {
    "task-sent": "sent",
    "task-received": "received",
    "task-started": "started",
    "task-succeeded": "succeeded",
    "task-failed": "failed",
    "task-retried": "asks for a retry",
    "task-revoked": "revoked",
    "task-rejected": "rejected",
}


def story_of(
    events: Sequence[StoryEvent],
    queue: str = "",
    nodes: Mapping[str, str] | None = None,
    happened: Sequence[Happening] = (),
) -> Story:
    """Lanes in the order client, broker, then each worker with its children beside it.

    Why a node did not finish what it had is read from what happened to it then, oldest first: a node
    that is back was lost all the same. Where nothing is known, from `nodes`, their states now.
    """
    told = _Telling(Lane("broker", queue) if queue else BROKER, nodes or {}, happened)
    for event in events:
        told.take(event)
    return told.story()


class _Telling:
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
        self._kept: int | None = None  # the dot of the broker that holds the message now
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
            before = self._add_plain("delivered again", cause=self._cause(last, event.at))
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
        for one in self._happened:
            if one.node == node and one.kind in ("lost", "left") and one.at >= self._received_at[node]:
                end = one.kind if one.at <= again_at + FOUND_WITHIN_S else ""
                break
        return f"redelivered: {node} {ENDS.get(end, 'did not finish it')}"

    def _interrupt(self, place: int) -> None:
        """Nobody hears of a run any more whose message was delivered again."""
        for lane, first in self._running.values():
            self._runs.append((lane, first, place))
        self._running.clear()

    def _held_before(self, event: StoryEvent, place: int) -> tuple[int, int]:
        """Nobody told of the sending (Celery's default): the broker held it all the same."""
        lane, dot = self._dots.pop()
        before = self._add_plain("waits in the queue; its sending was not told")
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
            _words(event),
            event.clock or None,
            at,
            self._run,
            ENDINGS.get(event.type, ""),
        )
        self._dots.append((lane, dot))
        return len(self._dots) - 1


def _words(event: StoryEvent) -> str:
    words = WORDS.get(event.type, event.type.removeprefix("task-"))
    if not event.detail or event.type in WITHOUT_DETAIL:
        return words
    return f"{words} to {event.detail}" if event.type == "task-sent" else f"{words}: {event.detail}"


def _worker(node: str) -> Lane:
    return Lane("worker", node, node)
