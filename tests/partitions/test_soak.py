"""A hundred partitions among five workers in network namespaces, judged by the checkers of the simulator.

Workers have no connections to each other: all they say goes through the broker. So each partition is one
between a worker and the broker, and two workers are parted from each other while either is. The link counts
packets between workers, of which there must be none.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time

import pytest

from tests.partitions import judging
from tests.partitions.field import WORKERS, Field, open_field
from tests.partitions.recorder import read_records
from tests.partitions.replay import Replay
from tests.partitions.schedule import PARTITIONS, Disturbance, Kind, make_schedule
from tests.servers.network import missing
from tests.waiting import wait_until
from umbel.clock import boot_time_s
from umbel.protocol.leadership.coordination import CLOSED_STATES
from umbel.sim.checkers import Violation

SOAK = bool(os.environ.get("UMBEL_SOAK"))
SEED = int(os.environ.get("UMBEL_SEED", random.randrange(2**32)))
COUNT = int(os.environ.get("UMBEL_PARTITIONS", "100"))  # of a soak
HEARTBEAT_S = 1.0 if SOAK else 0.5
SETTLING_S = 300.0
_WHY_NOT = missing()
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT),
]
Say = Callable[[str], None]
# Rules that are broken in real workers (`mutants.py`), and what must notice.
MUTANTS = {
    "leads-on": "L1",
    "acts-before-start": "KS1",
    "joins-twice": "M1",
    "gives-up-the-living": "M2",
    "never-takes-back": "M3",
    "drops-the-redelivered": "lost",
    "sends-twice": "sent twice",
}


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """A soak shows where it is; a test that passes is silent."""

    def said(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    return said if SOAK else print


@pytest.mark.parametrize("broker", ["redis", "amqp"] if SOAK else ["redis"])
def test_no_partition_loses_a_task_doubles_a_leader_or_goes_unseen(
    broker: str, tmp_path: Path, say: Say
) -> None:
    say(f"\n{broker}: seed {SEED} (UMBEL_SEED={SEED} brings it back)")
    schedule = _schedule()
    with open_field(broker, tmp_path, heartbeat_s=HEARTBEAT_S, handlers_s=15.0 if SOAK else 2.0) as field:
        field.run(schedule, random.Random(SEED), say)
        _settle(field, say)
        # A slot that was sent may have to wait until the lease of its worker ends.
        wait_until(lambda: not delivery(field)["left out"], what="the periodic task of every second to run")
        found = judge(field, schedule, say)
        figures = delivery(field)
    say(f"{broker}: {figures}")
    assert not found, "\n".join(map(str, found))
    assert not figures["lost"] and not figures["left out"]
    assert not figures["sent twice"] and not figures["followed twice"]


@pytest.mark.skipif(not SOAK, reason="a soak: seven clusters, each with one rule broken")
@pytest.mark.parametrize(("mutant", "promise"), MUTANTS.items())
def test_each_checker_notices_real_workers_that_break_its_rule(
    mutant: str, promise: str, tmp_path: Path, say: Say
) -> None:
    schedule = [Disturbance(4.0 * number, 12.0, name, Kind.BOTH) for number, name in enumerate(WORKERS)]
    with open_field("redis", tmp_path, heartbeat_s=HEARTBEAT_S, mutant=mutant) as field:
        field.run(schedule, random.Random(SEED), say)
        _await_the_end(field)
        found = [one.promise for one in judge(field, schedule, say)]
        figures = delivery(field)
    found += [name for name in ("lost", "sent twice") if figures[name]]
    say(f"{mutant}: {Counter(found)}")
    assert promise in found


def _schedule() -> tuple[Disturbance, ...]:
    if SOAK:
        return make_schedule(SEED, WORKERS, partitions=COUNT, rough=COUNT // 5)
    return make_schedule(
        SEED, WORKERS, partitions=4, rough=1, lasts_s=(2.0, 5.0), at_once=4, apart_s=(0.0, 0.5)
    )


def _settle(field: Field, say: Say) -> None:
    """Fair weather: until everything that was asked for has ended and everybody sees everybody."""
    say("fair weather")
    _await_the_end(field)
    wait_until(lambda: _all_see_all(field), deadline_s=SETTLING_S, what="everybody to see everybody")


def _await_the_end(field: Field) -> None:
    wait_until(lambda: not field.unfinished(), deadline_s=SETTLING_S, what="every task to end")
    wait_until(
        lambda: all(one.state in CLOSED_STATES for one in field.elections().values()),
        deadline_s=SETTLING_S,
        what="every election to end",
    )


def _all_see_all(field: Field) -> bool:
    views = {one.who: one.view for one in read_records(field.records) if one.machine == "membership"}
    return len(views) == len(WORKERS) and all(view == views.keys() - {who} for who, view in views.items())


def judge(field: Field, schedule: Sequence[Disturbance], say: Say) -> list[Violation]:
    """Everything that the checkers have to say."""
    began_s, replay_s = field.began_s, judging.SEEN_BEATS * HEARTBEAT_S + judging.DEAF_S

    def is_well(observer: str, by: str, subject: str, at_s: float) -> bool:
        concerned = {subject, observer} if by == observer else {subject}
        return not any(
            judging.is_disturbed(schedule, one, at_s - began_s, within_s=replay_s) for one in concerned
        )

    replay = Replay(field.traffic.asks, nodes=len(WORKERS), is_well=is_well)
    kept = field.elections()
    for name, ask in field.traffic.asks.items():
        replay.opened(ask.at_s, kept[name].request)
    records = list(read_records(field.records))
    replay.read(records)
    assert field.sampler.samples, "nobody asked the store who leads"
    replay.read_samples(field.sampler.samples)
    replay.read_outcomes(boot_time_s(), kept)
    found = list(replay.judge(there=frozenset(one.who for one in records if one.machine == "membership")))
    found += _unseen(field, schedule, say)
    if field.net.between:
        found.append(Violation("NET", 0.0, "", f"{field.net.between} packets between workers"))
    say(f"judged: {replay.counts}, {field.net.dropped} packets dropped")
    return found


def _unseen(field: Field, schedule: Sequence[Disturbance], say: Say) -> list[Violation]:
    seen = [(at_s - field.began_s, place, what) for at_s, place, what in field.watch.changes]
    long = [one for one in schedule if judging.must_be_seen(one, HEARTBEAT_S)]
    unseen = [one for one in long if not judging.was_seen(one, seen)]
    partitions = [one for one in schedule if one.kind in PARTITIONS]
    also = sum(judging.was_seen(one, seen) for one in partitions)
    words = Counter(what for _, _, what in seen)
    say(
        f"{len(partitions)} partitions, {also} of them seen as lost; {len(long)} had to be, "
        f"{len(unseen)} were not; {dict(words)}"
    )
    away = judging.not_taken_back(WORKERS, seen)
    return [
        *(Violation("SEEN", one.at_s, one.place, f"nobody noticed {one}") for one in unseen),
        *(Violation("BACK", 0.0, place, "was not taken back") for place in away),
    ]


def delivery(field: Field) -> dict[str, int]:
    """What became of tasks, workflows and periodic tasks."""
    work, flows = judging.runs_of(field.journal("work")), judging.runs_of(field.journal("flows"))
    slots = judging.runs_of(field.journal("slots"))
    wrong = [one.id for one, expected in field.traffic.flows if one.get(timeout=5) != expected]
    assert not wrong, f"workflows with a wrong result: {wrong}"
    led = [one for one in read_records(field.records) if one.name == "scheduler" and one.view]
    repeated = sum(len(flags) - 1 for runs in (work, flows, slots) for flags in runs.values())
    twice = [one for runs in (work, slots) for one in judging.sent_twice(runs)]
    now_s = int(time())
    return {
        "tasks": len(field.traffic.work),
        "lost": len(judging.lost(field.traffic.work, work)),
        "repeated": repeated,
        "sent twice": len(twice),
        "followed twice": len(judging.sent_twice(flows)),
        "workflows": len(field.traffic.flows),
        "elections": len(field.traffic.asks),
        "slots": len(slots),
        "left out": len(judging.left_out(slots, now_s - 7200, now_s + 2)),
        "leaderships": len({(one.who, one.view[0]) for one in led}),
    }
