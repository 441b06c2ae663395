"""One node and the ways to each stage of an election, for the tests of its table."""

from dataclasses import replace

from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallStart,
    ClaimReplied,
    ClosedReceived,
    Effect,
    Event,
    Finished,
    HandlerEnded,
    Phase,
    PublishElected,
    RecordView,
    RunHandler,
    Stage,
    StartReplied,
)
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership.coordination import (
    Busy,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    Policy,
    election_key,
)
from umbel.protocol.machine import Tick

NODE, ME, OTHER = "ada@host", "ada@host.1.100", "bob@host.2.200"
KEY = election_key("celery", "e")
TTL = 10.0
WALL = 1_000_000.0
ONCE = ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, asked_at=WALL, expires_s=300.0)
AGAIN = replace(ONCE, policy=Policy.AT_LEAST_ONCE)


def lowest(low: float, high: float) -> float:
    return low


class Node:
    """A machine and its hands: `do` steps it at the time of the test's clock."""

    def __init__(self, *topics: str, settings: ElectionSettings | None = None) -> None:
        self.machine = Elections(
            NODE, ME, frozenset(topics or ("task",)), settings or ElectionSettings(), lowest
        )
        self.now_s = 0.0

    def do(self, event: Event | Tick, at_s: float | None = None) -> list[Effect]:
        self.now_s = self.now_s if at_s is None else at_s
        return self.machine.step(event, Instant(self.now_s, WALL + self.now_s))

    @property
    def record(self) -> RecordView:
        (record,) = self.machine.snapshot().records
        return record


def waiting(request: ElectionRequest = ONCE) -> Node:
    node = Node()
    assert node.do(Asked(request)) == []
    return node


def claiming(request: ElectionRequest = ONCE) -> Node:
    node = waiting(request)
    assert node.do(Tick()) == [CallClaim("e", KEY, ME, request, TTL, sent_s=0.0)]
    return node


def starting(request: ElectionRequest = ONCE, term: int = 7) -> Node:
    node = claiming(request)
    assert node.do(ClaimReplied("e", 0.0, Granted(term, 1)), 0.1) == [
        PublishElected(Phase.ELECTED, "e", "task", request.policy, ME, term, 1, request=request),
        CallStart("e", KEY, ME, term, sent_s=0.1),
    ]
    return node


def acting(request: ElectionRequest = ONCE, term: int = 7) -> Node:
    node = starting(request, term)
    assert node.do(StartReplied("e", term, 0.1, ok=True), 0.2) == [
        RunHandler(request, KEY, term, 1, deadline_s=9.1)
    ]
    return node


def finishing(request: ElectionRequest = ONCE, *, ok: bool = True) -> Node:
    node = acting(request)
    outcome = "ok" if ok else "error: broken"
    ended = HandlerEnded("e", 7, ok=ok, outcome="" if ok else "broken")
    assert node.do(ended, 1.0) == [CallFinish("e", KEY, ME, 7, outcome)]
    return node


def watching(request: ElectionRequest = ONCE, left_s: float = 4.0) -> Node:
    node = claiming(request)
    assert node.do(ClaimReplied("e", 0.0, Busy(OTHER, 5, left_s))) == []
    assert (node.record.stage, node.record.winner, node.record.term) == (Stage.WATCH, OTHER, 5)
    return node


def closed(request: ElectionRequest = ONCE) -> Node:
    node = waiting(request)
    assert node.do(ClosedReceived("e", Phase.DONE)) == [Finished("e", ElectionState.DONE)]
    return node


ALL_STAGES = [waiting, claiming, starting, acting, finishing, watching, closed]
