"""Node: the shell around a worker's machines in the simulator.

It works like `coordination/driver.py` and the elections step: a due deadline first, then one event at a time,
effects in their order. It can die at any moment, be paused while its inbox fills, and receive reports that
others are lost. A process that is restarted is another Node.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    CancelHandler,
    ClaimReplied,
    ClosedReceived,
    Dropped,
    Effect,
    ElectedReceived,
    Event,
    Finished,
    FinishReplied,
    HandlerEnded,
    Phase,
    Prolong,
    PublishElected,
    RenewReplied,
    Resend,
    RunHandler,
    StartReplied,
    StopElections,
)
from umbel.protocol.leadership.coordination import (
    ElectionReply,
    Granted,
    Instant,
    Policy,
)
from umbel.protocol.machine import Tick
from umbel.sim.plan import Alarm, Process
from umbel.sim.sweeper import Sweeper
from umbel.sim.world import NodeClock

if TYPE_CHECKING:
    from umbel.sim.rounds import Cluster

TICK = Tick()
CANCELLED_S = 0.05  # time for a cancelled handler to end


class Node(Process):
    """A process that takes part in elections and in the sweeper's lease."""

    def __init__(self, cluster: "Cluster", index: int, pid: int, clock: NodeClock) -> None:
        super().__init__(cluster.world, index, pid, clock)
        self.elections = cluster.make_elections(self)
        self.sweeper = Sweeper(cluster, self)
        self._cluster = cluster
        self._unperformed: list[Effect] = []
        self._alarm = Alarm(self, self._tick)
        self._running: dict[tuple[str, int], int] = {}
        self._runs = 0
        self._perform: dict[type, Callable[[Any], None]] = {
            CallClaim: self._call_claim,
            CallStart: self._call_start,
            CallRenew: self._call_renew,
            CallFinish: self._call_finish,
            PublishElected: self._tell,
            RunHandler: self._run_handler,
            Prolong: self._prolong,
            CancelHandler: self._cancel_handler,
            Resend: self._resend,
            Dropped: self._dropped,
            Finished: self._finished,
        }

    # ---- faults ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the campaign for the sweeper's lease."""
        self.sweeper.start()

    def stop(self) -> None:
        """Stop both machines gracefully."""
        self.hear(StopElections())
        self.sweeper.stop()

    def crash(self) -> None:
        """Die at once, and report it to the checkers."""
        super().crash()
        self._cluster.checkers.crashed(self.holder)

    def wake(self) -> None:
        """Perform the effects that were delayed by a pause."""
        effects, self._unperformed = self._unperformed, []
        self._perform_all(effects)

    def woken(self) -> None:
        """Set the alarm after a pause, and let the sweeper continue."""
        self._alarm.set_anew(self.elections.deadline)
        self.sweeper.resume()

    # ---- the shell ---------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Pass an event to the elections machine, after a due deadline."""
        now = self.clock.read(self.world.now)
        deadline = self.elections.deadline
        if deadline is not None and deadline <= now.boot_s:
            self._step(TICK, now)
            if not self.up:
                return
            if self.paused:
                self._inbox.insert(0, event)
                return
        self._step(event, now)
        self._alarm.set(self.elections.deadline)

    def _step(self, event: Event | Tick, now: Instant) -> None:
        cluster = self._cluster
        if cluster.armed and isinstance(event, HandlerEnded) and cluster.befalls("crash-after-handler", self):
            return
        effects = self.elections.step(event, now)
        self.world.trace.note(
            f"{self.world.now:.6f} {self.index} {type(event).__name__}"
            f" {getattr(event, 'election_id', '')} {len(effects)}"
        )
        cluster.stepped(self)
        if not effects:
            return
        if cluster.armed and self._falls_before(event, effects):
            return
        self._perform_all(effects)

    def _falls_before(self, event: Event | Tick, effects: list[Effect]) -> bool:
        """Return whether the node dies or pauses after this decision, before its effects."""
        cluster = self._cluster
        kinds = {type(effect) for effect in effects}
        granted = isinstance(event, ClaimReplied) and isinstance(event.reply, Granted) and CallStart in kinds
        if granted and cluster.befalls("crash-after-grant", self):
            return True
        if RunHandler in kinds and cluster.befalls("crash-after-start", self):
            return True
        if (RunHandler in kinds or CallStart in kinds) and cluster.befalls("stall", self):
            self._unperformed = effects
            return True
        return False

    def _perform_all(self, effects: list[Effect]) -> None:
        perform = self._perform
        for effect in effects:
            if not self.up:
                return
            perform[type(effect)](effect)

    def _tick(self) -> None:
        self._step(TICK, self.clock.read(self.world.now))
        self._alarm.set(self.elections.deadline)

    # ---- effects -----------------------------------------------------------------------------------

    def _call_claim(self, effect: CallClaim) -> None:
        store = self._cluster.store
        arguments = (effect.key, effect.holder, effect.request, effect.ttl_s)
        store.call(self.index, store.claim, arguments, self._claim_replied, effect)

    def _claim_replied(self, call: CallClaim, reply: ElectionReply) -> None:
        self.hear(ClaimReplied(call.election_id, call.sent_s, reply))

    def _call_start(self, effect: CallStart) -> None:
        store = self._cluster.store
        arguments = (effect.key, effect.holder, effect.term)
        store.call(self.index, store.start, arguments, self._start_replied, effect)

    def _start_replied(self, call: CallStart, ok: bool) -> None:
        self.hear(StartReplied(call.election_id, call.term, call.sent_s, ok))

    def _call_renew(self, effect: CallRenew) -> None:
        if self._cluster.armed and self._cluster.befalls("crash-in-renew", self):
            return
        store = self._cluster.store
        arguments = (effect.key, effect.holder, effect.term)
        store.call(self.index, store.renew, arguments, self._renew_replied, effect)

    def _renew_replied(self, call: CallRenew, ok: bool) -> None:
        self.hear(RenewReplied(call.election_id, call.term, call.sent_s, ok))

    def _call_finish(self, effect: CallFinish) -> None:
        if self._cluster.armed and self._cluster.befalls("crash-before-done", self):
            return
        store = self._cluster.store
        arguments = (effect.key, effect.holder, effect.term, effect.outcome)
        store.call(self.index, store.finish, arguments, self._finish_replied, effect)

    def _finish_replied(self, call: CallFinish, ok: bool) -> None:
        self.hear(FinishReplied(call.election_id, call.term, ok))

    def _tell(self, tell: PublishElected) -> None:
        self._cluster.checkers.told(tell)
        event: Event
        if tell.phase is Phase.ELECTED:
            event = ElectedReceived(tell.election_id, tell.winner, tell.term, tell.attempt, tell.request)
        else:
            event = ClosedReceived(tell.election_id, tell.phase)
        self._cluster.network.broadcast(self.index, event, self._cluster.nodes)

    def _run_handler(self, run: RunHandler) -> None:
        election_id = run.request.election_id
        until = self.clock.when(run.deadline_s)
        if run.request.policy is Policy.AT_LEAST_ONCE and self._stalled_beyond(until):
            # A handler checks still_mine() before it has any effect.
            self.hear(HandlerEnded(election_id, run.term, ok=False, outcome=f"{self.holder} {run.term} late"))
            return
        self._cluster.checkers.ran(self.holder, run, until)
        ask = self._cluster.asks[election_id]
        self._runs += 1
        self._running[election_id, run.term] = self._runs
        outcome = f"{self.holder} {run.term}"
        self.world.after(ask.handler_s, self._handler_ended, self._runs, run, ask.succeeds, outcome)
        if self._cluster.armed:
            self._cluster.befalls("crash-in-handler", self)

    def _stalled_beyond(self, until: float) -> bool:
        """Return whether the node was paused between deciding and acting, until its time was over."""
        return self._cluster.stalled.pop(self.holder, False) and self.world.now >= until

    def _handler_ended(self, number: int, run: RunHandler, ok: bool, outcome: str) -> None:
        election_id = run.request.election_id
        if not self.up or self._running.get((election_id, run.term)) != number:
            return
        del self._running[election_id, run.term]
        self._cluster.checkers.ended(self.holder, election_id)
        self.hear(HandlerEnded(election_id, run.term, ok, outcome))

    def _prolong(self, effect: Prolong) -> None:
        until = self.clock.when(effect.deadline_s)
        self._cluster.checkers.prolonged(self.holder, effect.election_id, until)

    def _cancel_handler(self, effect: CancelHandler) -> None:
        self._cluster.count("cancelled")
        number = self._running.pop((effect.election_id, effect.term), None)
        if number is not None:
            self._cluster.checkers.ended(self.holder, effect.election_id)
            ended = HandlerEnded(effect.election_id, effect.term, ok=False, outcome="cancelled")
            self.world.after(CANCELLED_S, self.hear, ended)

    def _resend(self, effect: Resend) -> None:
        self._cluster.checkers.resent(effect.request.election_id)
        self._cluster.network.broadcast(self.index, Asked(effect.request), self._cluster.nodes)

    def _dropped(self, effect: Dropped) -> None:
        self._cluster.count("shed" if effect.shed else "dropped")

    def _finished(self, effect: Finished) -> None:
        pass
