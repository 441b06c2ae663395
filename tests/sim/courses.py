"""Courses: what can happen next to one election on two nodes, as `exhaustive.py` searches it.

A state is a handful of numbers; what they stand for (machines, records, messages) is kept once. A
node's step depends on its own state and the event alone, and the store's on its record and the call,
so each is computed once, by the real machine and the real decisions, and then looked up.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from umbel.protocol.election.election import SAFE_SHARE, Elections
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    ClaimReplied,
    ClosedReceived,
    Effect,
    ElectedReceived,
    Event,
    FinishReplied,
    HandlerEnded,
    Phase,
    PublishElected,
    RenewReplied,
    RunHandler,
    Stage,
    StartReplied,
    Swept,
)
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership import coordination
from umbel.protocol.leadership.coordination import (
    TTL_S,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    Policy,
    StoreFacts,
)
from umbel.protocol.machine import Tick
from umbel.sim.world import EPOCH_S

NODES = ("a@sim", "b@sim")
ELECTION = "e"

Call = CallClaim | CallStart | CallRenew | CallFinish
TICK = Tick()
Message = Call | tuple[str, Event]  # to the store, or to a process


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may go wrong."""

    crashes: int = 1
    losses: int = 1
    duplicates: int = 1
    expiries: int = 2


class State(NamedTuple):
    """Numbers stand for what they index: processes, records and messages are kept once."""

    jumps: int  # how often the holder's time ran out
    record: int
    nodes: tuple[int, int]
    messages: tuple[int, ...]
    budget: tuple[int, int, int]  # crashes, losses, duplicates left
    last_run: int  # the term of the last run, 0 without one


@dataclass(slots=True)
class _Kept:
    """Values by number, each kept once."""

    values: list[object] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)

    def number(self, key: object, value: object) -> int:
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.values)
            self.values.append(value)
        return found


class Courses:
    """The states of one election, from the first on. `violation` is the first broken promise that was met."""

    def __init__(self, policy: Policy, budget: Budget, machine: Callable[..., Elections]) -> None:
        self._request = ElectionRequest(ELECTION, "task", b"", policy, EPOCH_S)
        self._policy = policy
        self._budget = budget
        self._make_machine = machine
        self._machines = _Kept()
        self._records = _Kept()
        self._messages = _Kept()
        self._steps: dict[tuple[int, int, object], tuple[int, list[Effect]]] = {}
        self._performed: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.violation: str | None = None

    @property
    def numbers(self) -> int:
        """The largest number that stands for something."""
        return max(len(kept.values) for kept in (self._machines, self._records, self._messages))

    def first(self) -> State:
        record = coordination.open_election(None, self._request, _now(0))
        # Both have heard of it; one that has not is one whose turn never comes.
        nodes = [self._step(self._fresh(index, 0), 0, Asked(self._request))[0] for index in (0, 1)]
        budget = (self._budget.crashes, self._budget.losses, self._budget.duplicates)
        return State(0, self._records.number(record, record), (nodes[0], nodes[1]), (), budget, 0)

    # ---- what can happen next ----------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[State]:
        if self._is_over(state):
            return
        crashes, losses, duplicates = state.budget
        for place, message in enumerate(state.messages):
            without = state._replace(messages=state.messages[:place] + state.messages[place + 1 :])
            yield from self._delivered(without, message)
            if losses:
                yield without._replace(budget=(crashes, losses - 1, duplicates))
            if duplicates and not self._receiver(message):  # arrives, and will arrive again
                doubled = state._replace(budget=(crashes, losses, duplicates - 1))
                yield from self._delivered(doubled, message)
        for index in range(len(NODES)):
            yield from self._moves_of(state, index)
            if crashes:
                yield self._crashed(state, index)
        record = self.record(state.record)
        held = record.state is ElectionState.HELD and record.expires_at > _now(state.jumps).boot_s
        if held and state.jumps < self._budget.expiries:
            nodes = [self._outlived(node) for node in state.nodes]
            yield state._replace(jumps=state.jumps + 1, nodes=(nodes[0], nodes[1]))

    def _outlived(self, node: int) -> int:
        """The same node when its deadline is over: when that was makes no difference."""
        known = self._machine(node)._table.records.get(ELECTION)
        if known is None or known.ended is not None:
            return node
        machine = _copied(self._machine(node))
        machine._table.records[ELECTION].deadline_s = -1.0
        return self._machines.number(_key(machine), machine)

    def _is_over(self, state: State) -> bool:
        """Whether nothing can run any more: the store has closed it and no yes to a start is on its way."""
        if self.record(state.record).state not in coordination.CLOSED_STATES:
            return False
        return not any(self._is_yes(number) for number in state.messages)

    def _is_yes(self, number: int) -> bool:
        message = self._messages.values[number]
        return isinstance(message, tuple) and isinstance(message[1], StartReplied) and message[1].ok

    def _crashed(self, state: State, index: int) -> State:
        """A node dies and is back at once as another process; what was on its way to it is lost."""
        crashes, losses, duplicates = state.budget
        holder = self._machine(state.nodes[index])._holder
        kept = tuple(number for number in state.messages if self._receiver(number) != holder)
        fresh = self._fresh(index, self._budget.crashes - crashes + 1)
        state = self._with_node(state, index, fresh)
        return state._replace(messages=kept, budget=(crashes - 1, losses, duplicates))

    def _receiver(self, number: int) -> str:
        message = self._messages.values[number]
        return message[0] if isinstance(message, tuple) else ""

    def _moves_of(self, state: State, index: int) -> Iterator[State]:
        """What a node does by itself: its timer fires, its handler ends, the sweep brings the election."""
        machine = self._machine(state.nodes[index])
        known = machine._table.records.get(ELECTION)
        record, now = self.record(state.record), _now(state.jumps)
        held = record.state is ElectionState.HELD and now.boot_s < record.expires_at
        if known is None or known.stage is Stage.CLOSED:
            if coordination.is_unfinished(record, now):
                yield from self._stepped(state, index, Swept(self._request))
        elif known.stage is Stage.WAIT:
            if index == 0 or self._has_begun(state):
                yield from self._stepped(state, index, TICK)
        elif known.stage is Stage.WATCH and not held:
            yield from self._stepped(state, index, TICK)
        elif known.stage is Stage.ACT and known.ended is None:
            yield from self._stepped(state, index, HandlerEnded(ELECTION, known.term, ok=True, outcome="ok"))
            stale = known.deadline_s < now.boot_s + SAFE_SHARE * TTL_S
            if known.timer_s is not None and stale and not self._is_asking(state, machine._holder):
                yield from self._stepped(state, index, TICK)
        elif known.stage is not Stage.WATCH and not self._is_asking(state, machine._holder):
            yield from self._stepped(state, index, TICK)

    def _has_begun(self, state: State) -> bool:
        """Whether the first node has claimed, or died: that the other is first would look the same."""
        first = self._machine(state.nodes[0])
        known = first._table.records.get(ELECTION)
        fresh = first._holder.endswith(".0") and (known is None or known.stage is Stage.WAIT)
        return not fresh

    def _is_asking(self, state: State, holder: str) -> bool:
        """Whether a call of this process, or an answer to it, is on its way."""
        for number in state.messages:
            message = self._messages.values[number]
            if isinstance(message, tuple):
                if message[0] == holder:
                    return True
            elif isinstance(message, Call) and message.holder == holder:
                return True
        return False

    def _delivered(self, state: State, number: int) -> list[State]:
        message = self._messages.values[number]
        if isinstance(message, tuple):
            return self._stepped(state, _place(message[0]), message[1])
        assert isinstance(message, Call)
        key = (state.record, state.jumps, number)
        found = self._performed.get(key)
        if found is None:
            found = self._performed[key] = self._perform(state, message)
        record, answer = found
        alive = self._machine(state.nodes[_place(message.holder)])._holder == message.holder
        messages = state.messages
        if alive and answer not in messages:
            messages = tuple(sorted((*messages, answer)))
        return [State(state.jumps, record, state.nodes, messages, state.budget, state.last_run)]

    # ---- the store ---------------------------------------------------------------------------------

    def _perform(self, state: State, call: Call) -> tuple[int, int]:
        """The record after a call, and the answer to it."""
        record, now = self.record(state.record), _now(state.jumps)
        reply: Event
        after: ElectionRecord | None
        match call:
            case CallClaim():
                facts = StoreFacts(EPOCH_S - 1.0, record.term)
                after, answer = coordination.claim_election(
                    record, call.holder, call.request, ttl_s=call.ttl_s, now=now, store=facts
                )
                reply = ClaimReplied(ELECTION, call.sent_s, answer)
                if isinstance(answer, Granted) and answer.term != record.term:
                    self._check_grant(state, record, call.holder, now)
            case CallStart():
                after = coordination.start_election(record, call.holder, call.term, now)
                reply = StartReplied(ELECTION, call.term, call.sent_s, ok=after is not None)
            case CallRenew():
                after = coordination.renew_election(record, call.holder, call.term, now)
                reply = RenewReplied(ELECTION, call.term, call.sent_s, ok=after is not None)
            case CallFinish():
                after = coordination.finish_election(record, call.holder, call.term, call.outcome, now)
                reply = FinishReplied(ELECTION, call.term, ok=after is not None)
        kept = record if after is None else after
        answered = (call.holder, reply)
        return self._records.number(kept, kept), self._messages.number(answered, answered)

    def _check_grant(self, state: State, record: ElectionRecord, holder: str, now: Instant) -> None:
        if record.state is ElectionState.HELD and now.boot_s < record.expires_at:
            self._fail(state, f"KS2: granted to {holder} while {record.holder} held it")
        if record.state is ElectionState.DONE:
            self._fail(state, f"KS3: granted to {holder} after it was done")

    # ---- the nodes ---------------------------------------------------------------------------------

    def _stepped(self, state: State, index: int, event: Event | Tick) -> list[State]:
        """A node takes one event; each broadcast that follows is heard at once by the other, or never."""
        key = (state.nodes[index], state.jumps, event)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._step(*key)
        following, effects = found
        states = [self._with_node(state, index, following)]
        for effect in effects:
            if isinstance(effect, PublishElected):
                heard = _heard(effect)
                states += [one for state in states for one in self._stepped(state, 1 - index, heard)]
            else:
                states = [self._effected(state, index, effect) for state in states]
        return states

    def _step(self, node: int, jumps: int, event: Event | Tick) -> tuple[int, list[Effect]]:
        machine = _copied(self._machine(node))
        now = _now(jumps)
        if isinstance(event, Tick):
            machine._table.arm(machine._table.records[ELECTION], now.boot_s)
        effects = machine.step(event, now)
        return self._machines.number(_key(machine), machine), effects

    def _effected(self, state: State, index: int, effect: Effect) -> State:
        match effect:
            case CallClaim() | CallStart() | CallRenew() | CallFinish():
                return self._sent(state, effect)
            case RunHandler():
                self._check_run(state, index, self._machine(state.nodes[index])._holder, effect)
                return state._replace(last_run=effect.term)
            case _:
                return state

    def _check_run(self, state: State, index: int, holder: str, run: RunHandler) -> None:
        record = self.record(state.record)
        if record.term == run.term and record.state is ElectionState.HELD and not record.started:
            self._fail(state, f"KS1: {holder} acts in term {run.term}, which it did not start")
        if record.state is ElectionState.DONE:
            self._fail(state, f"KS3: {holder} runs it after it was done")
        if self._policy is Policy.AT_MOST_ONCE:
            if state.last_run:
                self._fail(state, f"KS1: {holder} runs it again")
            return
        if run.term <= state.last_run:
            self._fail(state, f"KS2: {holder} runs it in term {run.term} after {state.last_run}")
        now = _now(state.jumps)
        other = self._machine(state.nodes[1 - index])._table.records.get(ELECTION)
        acting = other is not None and other.stage is Stage.ACT and other.ended is None
        if acting and other is not None and now.boot_s < min(other.deadline_s, run.deadline_s):
            self._fail(state, f"KS2: {holder} runs it while the other may act")

    # ---- inside ------------------------------------------------------------------------------------

    def _sent(self, state: State, message: Message) -> State:
        number = self._messages.number(message, message)
        if number in state.messages:
            return state
        return state._replace(messages=tuple(sorted((*state.messages, number))))

    def _with_node(self, state: State, index: int, node: int) -> State:
        nodes = (node, state.nodes[1]) if index == 0 else (state.nodes[0], node)
        return state._replace(nodes=nodes)

    def _fresh(self, index: int, incarnation: int) -> int:
        holder = f"{NODES[index]}.{incarnation}"
        machine = self._make_machine(NODES[index], holder, frozenset({"task"}), ElectionSettings(), _lowest)
        return self._machines.number(_key(machine), machine)

    def _machine(self, number: int) -> Elections:
        machine = self._machines.values[number]
        assert isinstance(machine, Elections)
        return machine

    def record(self, number: int) -> ElectionRecord:
        record = self._records.values[number]
        assert isinstance(record, ElectionRecord)
        return record

    def _fail(self, state: State, what: str) -> None:
        self.violation = self.violation or f"{what} (after {state.jumps} expiries)"


def _lowest(low: float, _high: float) -> float:
    return low


def _now(jumps: int) -> Instant:
    return _INSTANTS[jumps]


_INSTANTS = [Instant(number * (TTL_S + 1.0), EPOCH_S + number * (TTL_S + 1.0)) for number in range(16)]


def _place(holder: str) -> int:
    return 0 if holder.startswith(NODES[0]) else 1


def _heard(tell: PublishElected) -> Event:
    if tell.phase is Phase.ELECTED:
        return ElectedReceived(ELECTION, tell.winner, tell.term, tell.attempt, tell.request)
    return ClosedReceived(ELECTION, tell.phase)


def _copied(machine: Elections) -> Elections:
    """A separate machine: its table and its one record are copied, the rest is never changed."""
    twin = copy(machine)
    twin._table = copy(machine._table)
    twin._table.records = {name: replace(one) for name, one in machine._table.records.items()}
    twin._table._tombstones = dict(machine._table._tombstones)
    twin._table._timers = list(machine._table._timers)
    return twin


def _key(machine: Elections) -> object:
    """All of a machine that decides what it may run; its timer only by whether it is set."""
    known = machine._table.records.get(ELECTION)
    if known is None:
        return machine._holder
    if known.stage in (Stage.START, Stage.ACT):
        rest = (known.term, known.deadline_s, known.lost, known.ended, known.timer_s is not None)
        return (machine._holder, known.stage, rest)
    return (machine._holder, known.stage)
