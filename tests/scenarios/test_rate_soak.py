"""A rate with many keys, a backlog for ten minutes and kills: no window has more, and no key gets less.

The ledger that the tasks write is the judge. Only with UMBEL_SOAK=1: `test_cluster_limits.py` has the small
one. SOAK_PACED_KEYS and SOAK_PACED_EACH say how many keys there are and how many messages each has.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

import pytest

from tests.cluster import Cluster
from tests.scenarios.cluster_limit_tasks import PER_MINUTE
from tests.scenarios.limit_ledger import (
    Call,
    Ledger,
    Workers,
    late_s,
    longest_rest_s,
    most_within,
    send_all,
)
from tests.scenarios.places import place
from umbel import Rate

WORKERS, KILLS, PLAIN = 8, 6, 40
LEASE_S = 2.0
RECOVERY_S = 3 * LEASE_S  # the lease, the sweep that sees its end, the next claim
LAST = 2 * KILLS  # of a key: so many may come back from the dead when nothing else of it waits
WAIT_S = 3600.0
KEYS = {"sqlite": 250, "redis": 1000}  # a message that waits and is called takes SQLite three commits
EACH = int(os.environ.get("SOAK_PACED_EACH", "180"))
TASKS_FILE = Path(__file__).with_name("cluster_limit_tasks.py")
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="it takes ten minutes: make soak"),
]


def paced_calls(keys: int) -> Iterator[Call]:
    for number in range(EACH):
        for key in range(keys):
            yield "paced", (f"k{key}", number)


def plain_took_s(cluster: Cluster, ledger: Ledger, turn: int) -> float:
    """How long tasks without a limit take from their send to the end of the last, beside all that waits."""
    sent_at = monotonic()
    send_all(cluster, (("plain", (turn * PLAIN + number,)) for number in range(PLAIN)))
    ledger.wait_for("plain", ledger.ended_of("plain") + PLAIN, deadline_s=WAIT_S)
    return max(ledger.ended["plain", "-", turn * PLAIN + number][0] for number in range(PLAIN)) - sent_at


@dataclass(frozen=True)
class Share:
    """What a key got of its rate while it had a backlog."""

    late_s: float
    longest_rest_s: float

    @classmethod
    def of(cls, times: list[tuple[float, float]], interval_s: float) -> "Share":
        starts = sorted(began for began, _ in times)[: EACH - LAST]
        return cls(late_s(starts, interval_s), longest_rest_s(starts))


@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_a_rate_is_kept_by_every_key_and_no_key_starves(broker: str, tmp_path: Path) -> None:
    keys = int(os.environ.get("SOAK_PACED_KEYS", KEYS[broker]))
    wanted, plain_s = keys * EACH, list[float]()
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=LEASE_S) as cluster,
    ):
        ledger = Ledger(tmp_path / "ledger.txt")
        send_all(cluster, paced_calls(keys))
        workers = Workers(cluster, ledger, WORKERS)
        workers.start()
        for kill in range(1, KILLS + 1):
            ledger.wait_for("paced", wanted * kill // (KILLS + 2), deadline_s=WAIT_S)
            workers.kill(kill)
            plain_s.append(plain_took_s(cluster, ledger, kill))
            assert ledger.ended_of("paced") < wanted, "nothing was left beside which others could run"
        ledger.wait_for("paced", wanted, deadline_s=WAIT_S)
    judge(ledger.times("paced"), keys, plain_s)


def judge(paced: dict[str, list[tuple[float, float]]], keys: int, plain_s: list[float]) -> None:
    pace = Rate(f"{PER_MINUTE}/m").terms.pace
    assert pace is not None
    most = {key: most_within(times, 60.0) for key, times in paced.items()}
    shares = {key: Share.of(times, pace.interval_s) for key, times in paced.items()}
    late = sorted(share.late_s for share in shares.values())
    rests = sorted(share.longest_rest_s for share in shares.values())
    began, ended = (pick(pick(times) for times in paced.values()) for pick in (min, max))
    starts = sum(map(len, paced.values()))
    print(f"\n{keys} keys, {starts} starts of {keys * EACH} messages in {ended[1] - began[0]:.0f} s")
    print(f"most in a minute: {max(most.values())} of {PER_MINUTE}")
    print(
        f"behind its pace after {EACH - LAST} starts: {median(late):.2f} s (median), {late[-1]:.2f} s (most)"
    )
    print(f"longest rest of a key: {median(rests):.2f} s (median), {rests[-1]:.2f} s (most)")
    print(f"{PLAIN} tasks without a limit, until the last: {', '.join(f'{took:.2f}' for took in plain_s)} s")
    assert len(paced) == keys
    assert max(most.values()) <= PER_MINUTE
    assert {key: share for key, share in shares.items() if share.late_s > KILLS * RECOVERY_S} == {}
    assert median(late) <= RECOVERY_S
    assert rests[-1] <= pace.interval_s + 2 * RECOVERY_S
