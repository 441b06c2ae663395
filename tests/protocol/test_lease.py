"""A lease from first asking to giving up (E6), and what holds whatever a network does to it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from umbel.protocol.leadership import coordination
from umbel.protocol.leadership.coordination import Instant, LeaseRecord, LeaseReply, acquire_lease
from umbel.protocol.leadership.lease import (
    AcquireReplied,
    CallAcquire,
    CallRelease,
    CallRenewLease,
    Campaign,
    Effect,
    Event,
    LeadershipLost,
    Lease,
    LeaseAcquired,
    LeaseReleased,
    LeaseRenewReplied,
    LeaseSettings,
    ReleaseReceived,
    Role,
    StopCampaign,
)
from umbel.protocol.machine import Tick

ME, OTHER = "ada@host.1.100", "bob@host.2.200"
GRANTED = LeaseReply(True, ME, 7, 15.0, b"data")
HELD = LeaseReply(False, OTHER, 5, 6.0, b"")


def at(seconds: float) -> Instant:
    return Instant(seconds, 1_000_000.0 + seconds)


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def fresh() -> Lease:
    return Lease("beat", ME, LeaseSettings(), middle)


def candidate() -> Lease:
    lease = fresh()
    assert lease.step(Campaign(), at(0.0)) == [CallAcquire("beat", ME, 15.0, 0.0)]
    return lease


def leader() -> Lease:
    lease = candidate()
    assert lease.step(AcquireReplied(0.0, GRANTED), at(0.5)) == [LeaseAcquired(7, b"data")]
    return lease


def follower() -> Lease:
    lease = candidate()
    assert lease.step(AcquireReplied(0.0, HELD), at(0.5)) == []
    return lease


def test_who_is_granted_the_lease_leads_for_nine_tenths_of_a_ttl_from_asking() -> None:
    lease = leader()
    assert lease.still_mine(at(13.4)) and not lease.still_mine(at(13.5))


def test_a_grant_that_comes_after_its_time_makes_no_leader() -> None:
    lease = candidate()
    assert lease.step(AcquireReplied(0.0, GRANTED), at(13.5)) == []
    assert lease.role is Role.FOLLOWER


def test_a_candidate_without_an_answer_asks_again() -> None:
    lease = candidate()
    assert lease.step(Tick(), at(1.0)) == []
    assert lease.step(Tick(), at(1.25)) == [CallAcquire("beat", ME, 15.0, 1.25)]


def test_a_follower_asks_when_the_holders_time_is_over_and_a_little_later() -> None:
    lease = follower()
    assert (lease.role, lease.holder_seen, lease.deadline) == (Role.FOLLOWER, OTHER, 7.5)
    assert lease.step(Tick(), at(7.5)) == [CallAcquire("beat", ME, 15.0, 7.5)]


def test_a_follower_that_hears_of_nothing_asks_as_often_as_it_was_told() -> None:
    lease = Lease("beat", ME, LeaseSettings(ask_every_s=1.0), middle)
    lease.step(Campaign(), at(0.0))
    lease.step(AcquireReplied(0.0, HELD), at(0.5))
    assert lease.deadline == 1.5


def test_a_follower_that_hears_of_a_release_asks_within_a_second() -> None:
    lease = follower()
    lease.step(ReleaseReceived(), at(1.0))
    assert lease.deadline == 1.25


def test_a_leader_renews_and_counts_from_when_it_asked() -> None:
    lease = leader()
    assert lease.step(Tick(), at(5.0)) == [CallRenewLease("beat", ME, 7, 15.0, 5.0)]
    assert lease.step(LeaseRenewReplied(7, 5.0, ok=True), at(8.0)) == []
    assert lease.give_up_s == 18.5
    assert lease.deadline == 10.0


def test_a_leader_whose_renewal_is_not_answered_asks_again_soon() -> None:
    lease = leader()
    assert lease.deadline == 5.0
    lease.step(Tick(), at(5.0))
    assert (lease.deadline, lease.step(Tick(), at(5.5))) == (6.0, [])
    assert lease.step(Tick(), at(6.0)) == [CallRenewLease("beat", ME, 7, 15.0, 6.0)]


def test_a_leader_that_nobody_answers_looks_up_when_its_time_is_over() -> None:
    lease = leader()
    lease.step(Tick(), at(13.0))
    assert lease.deadline == 13.5  # before it would ask again


def test_a_leader_that_is_refused_follows_at_once() -> None:
    lease = leader()
    (lost,) = lease.step(LeaseRenewReplied(7, 5.0, ok=False), at(5.1))
    assert isinstance(lost, LeadershipLost) and lost.term == 7
    assert lease.role is Role.FOLLOWER
    assert (lease.holder_seen, lease.deadline) == ("", 6.1)  # nobody knows how long the other has it


@pytest.mark.parametrize(
    "event",
    [
        Tick(),
        LeaseRenewReplied(7, 13.0, ok=True),
        ReleaseReceived(),
        Campaign(),
        AcquireReplied(1.0, GRANTED),
    ],
)
def test_a_leader_that_slept_too_long_looks_at_its_time_before_anything_else(event: Event | Tick) -> None:
    lease = leader()
    lost, *rest = lease.step(event, at(13.5))
    assert isinstance(lost, LeadershipLost)
    assert lease.role is Role.FOLLOWER and not any(isinstance(effect, CallRenewLease) for effect in rest)


def test_a_loss_says_whether_the_leader_was_late_or_refused() -> None:
    late, refused = leader(), leader()
    (slept,) = late.step(ReleaseReceived(), at(13.5))
    (told,) = refused.step(LeaseRenewReplied(7, 5.0, ok=False), at(5.1))
    assert isinstance(slept, LeadershipLost) and isinstance(told, LeadershipLost)
    assert slept.reason and told.reason and slept.reason != told.reason


def test_a_renewal_of_an_older_term_is_ignored() -> None:
    lease = leader()
    assert lease.step(LeaseRenewReplied(6, 5.0, ok=False), at(5.1)) == []
    assert lease.role is Role.LEADER


def test_an_answer_that_arrives_out_of_order_never_shortens_the_time() -> None:
    lease = leader()
    lease.step(LeaseRenewReplied(7, 5.0, ok=True), at(6.0))
    lease.step(LeaseRenewReplied(7, 4.0, ok=True), at(6.1))
    assert lease.give_up_s == 18.5


def test_a_leader_that_stops_releases_the_lease() -> None:
    lease = leader()
    assert lease.step(StopCampaign(), at(1.0)) == [CallRelease("beat", ME, 7), LeaseReleased(7)]
    assert lease.deadline is None and not lease.still_mine(at(1.0))


def test_a_stopped_candidate_returns_what_it_is_granted_late() -> None:
    lease = candidate()
    assert lease.step(StopCampaign(), at(0.1)) == []
    assert lease.step(AcquireReplied(0.0, GRANTED), at(0.2)) == [CallRelease("beat", ME, 7)]
    assert lease.role is Role.FOLLOWER


def test_one_lease_serves_one_campaign() -> None:
    lease = leader()
    lease.step(StopCampaign(), at(1.0))
    assert lease.step(Campaign(), at(1.1)) == []


def test_who_has_not_asked_knows_nothing_and_waits_for_nothing() -> None:
    lease = fresh()
    assert (lease.role, lease.term, lease.holder_seen, lease.deadline) == (Role.FOLLOWER, 0, "", None)
    assert not lease.still_mine(at(0.0))
    assert lease.step(ReleaseReceived(), at(0.0)) == lease.step(Tick(), at(1.0)) == []
    assert lease.deadline is None


def test_who_leads_is_known_from_every_answer() -> None:
    known = [(lease.term, lease.holder_seen) for lease in (leader(), follower())]
    assert known == [(7, ME), (5, OTHER)]
    lease = follower()
    lease.step(ReleaseReceived(), at(1.0))
    assert lease.holder_seen == ""


def test_a_release_changes_nothing_for_who_leads_or_asks() -> None:
    for lease in (leader(), candidate()):
        before = (lease.role, lease.holder_seen, lease.deadline)
        assert lease.step(ReleaseReceived(), at(0.6)) == []
        assert (lease.role, lease.holder_seen, lease.deadline) == before


def test_a_leader_that_lost_it_asks_once_the_store_has_forgotten_it_too() -> None:
    lease = leader()
    lease.step(ReleaseReceived(), at(13.5))
    assert lease.role is Role.FOLLOWER and lease.deadline == 13.75  # heard of a release, as it happens
    lease = leader()
    lease.step(LeaseRenewReplied(7, 9.0, ok=True), at(13.5))
    assert lease.deadline == pytest.approx(13.5 + 1.5 + 1.0)


def test_a_grant_that_came_too_late_is_asked_for_again_soon() -> None:
    lease = candidate()
    lease.step(AcquireReplied(0.0, GRANTED), at(13.5))
    assert lease.deadline == 14.5


def test_a_leader_that_stops_knows_of_no_holder_and_a_follower_that_stops_of_the_last() -> None:
    led, followed = leader(), follower()
    for lease in (led, followed):
        lease.step(StopCampaign(), at(1.0))
        assert lease.step(Tick(), at(99.0)) == []
    assert (led.holder_seen, followed.holder_seen) == ("", OTHER)
    assert followed.step(ReleaseReceived(), at(2.0)) == [] and followed.deadline is None


def test_roles_are_words_that_people_read() -> None:
    assert list(Role) == ["follower", "candidate", "leader"]


@dataclass
class World:
    """Two nodes and the store's own decisions; clocks run up to 5 % off the store's."""

    rng: random.Random
    store_s: float = 0.0
    record: LeaseRecord | None = None
    last_term: int = 0
    mail: list[tuple[int, Event]] = field(default_factory=list)
    calls: list[tuple[int, Effect]] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    holders: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        for node in range(2):
            self.leases.append(self.campaign())
            self.rates.append(self.rng.uniform(0.95, 1.05))
            self.step(node, Campaign())

    def campaign(self) -> Lease:
        holder = f"holder{next(self.holders)}"
        return Lease("beat", holder, LeaseSettings(), self.rng.uniform)

    def restart(self, node: int) -> None:
        self.step(node, StopCampaign())
        self.mail = [(to, event) for to, event in self.mail if to != node]
        self.calls = [(who, call) for who, call in self.calls if who != node or isinstance(call, CallRelease)]
        self.leases[node] = self.campaign()
        self.step(node, Campaign())

    def now(self, node: int) -> Instant:
        return at(self.store_s * self.rates[node])

    def step(self, node: int, event: Event | Tick) -> None:
        for effect in self.leases[node].step(event, self.now(node)):
            if isinstance(effect, CallAcquire | CallRenewLease | CallRelease):
                self.calls.append((node, effect))

    def answer(self, node: int, call: Effect) -> None:
        now = at(self.store_s)
        match call:
            case CallAcquire(_, holder, ttl_s, sent_s):
                self.record, reply = acquire_lease(
                    self.record, holder, ttl_s=ttl_s, now=now, last_term=self.last_term
                )
                self.last_term = max(self.last_term, reply.term)
                self.mail.append((node, AcquireReplied(sent_s, reply)))
            case CallRenewLease(_, holder, term, ttl_s, sent_s):
                kept = coordination.renew_lease(self.record, holder, term, ttl_s=ttl_s, now=now)
                self.record = kept or self.record
                self.mail.append((node, LeaseRenewReplied(term, sent_s, kept is not None)))
            case CallRelease(_, holder, term):
                self.record = coordination.release_lease(self.record, holder, term, now) or self.record
            case _:
                raise AssertionError(call)

    def leaders(self) -> list[int]:
        return [node for node, lease in enumerate(self.leases) if lease.still_mine(self.now(node))]


@pytest.mark.parametrize("seed", range(60))
def test_who_believes_to_lead_holds_the_lease_in_the_store(seed: int) -> None:
    world = World(random.Random(seed))
    led = 0
    for _ in range(400):
        chance = world.rng.random()
        if world.calls and chance < 0.4:
            world.answer(*world.calls.pop(world.rng.randrange(len(world.calls))))
        elif world.mail and chance < 0.75:
            world.step(*world.mail.pop(world.rng.randrange(len(world.mail))))
        elif chance < 0.78 and world.mail:
            world.mail.pop()
        elif chance < 0.79:
            world.restart(world.rng.randrange(2))
        else:
            world.store_s += world.rng.choice((0.1, 0.5, 2.0, 5.0))
            for node in world.rng.sample((0, 1), world.rng.randrange(3)):
                world.step(node, Tick())
        for node in world.leaders():
            led += 1
            assert world.record is not None
            lease = world.leases[node]
            assert (world.record.term, world.store_s < world.record.expires_at) == (lease.term, True)
    assert led
