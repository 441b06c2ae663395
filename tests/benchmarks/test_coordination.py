"""The benchmark counts what it says it counts; its figures are for `make bench`."""

from pathlib import Path

import pytest

from benchmarks._coordination.contenders import FORMULA, UMBEL, Sizes
from benchmarks._coordination.listening import ELECTION, OTHER, STORE, kind_of

KEY = "4387987b5ab24c925924ecc1b212566b"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('1.5 [0 127.0.0.1:1] "PUBLISH" "/0.celery.pidbox" "{}"', ELECTION),
        ('1.5 [0 127.0.0.1:1] "PUBLISH" "/0.celeryev/worker.elect.ack" "{}"', ELECTION),
        ('1.5 [0 127.0.0.1:1] "publish" "/0.celeryev/worker.elected" "{}"', ELECTION),
        ('1.5 [0 127.0.0.1:1] "PUBLISH" "/0.celeryev/worker.heartbeat" "worker.elect"', OTHER),
        (f'1.5 [0 127.0.0.1:1] "EVALSHA" "ab" "0" "" "" "claim" "{KEY}" "x"', STORE),
        (f'1.5 [0 127.0.0.1:1] "EVALSHA" "ab" "0" "" "" "read" "{KEY}"', ""),
        ('1.5 [0 127.0.0.1:1] "LPUSH" "celery" "publish"', ""),
        ("OK", ""),
    ],
)
def test_what_the_server_is_asked_is_sorted_by_what_it_is_for(line: str, kind: str) -> None:
    assert kind_of(line) == kind


def test_a_cluster_is_grown_and_counted(tmp_path: Path) -> None:
    sizes = Sizes(nodes=(1, 2), idle_s=0.1, acquainted_s=0.1)
    counted = UMBEL.measure(tmp_path, 1, sizes)
    assert counted["election_2"] == 3.0  # the request, who won, how it ended
    assert counted["store_2"] >= 4.0  # opened, claimed, started, finished
    kinds = ("election", "store", "decided", "rest")
    assert set(counted) == {f"{kind}_{nodes}" for kind in kinds for nodes in (1, 2)}
    assert FORMULA.measure(tmp_path, 1, sizes)["election_2"] == 7.0
