import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import psutil
import pytest

from benchmarks._harness.benchmark import Benchmark
from benchmarks._harness.measures import Measure, Ratio, Target, changes, ratios, verdicts
from benchmarks._harness.processes import BenchmarkFailed, answer_of, running
from tests.waiting import wait_until

DRAIN = Measure("drain", "drain", "tasks/s")
LATENCY = Measure("latency", "latency", "ms", higher_is_better=False)


def test_a_ratio_says_how_many_times_better_in_either_direction() -> None:
    ours = {"drain": [300.0, 330.0, 600.0], "latency": [2.0, 2.0, 2.0]}
    theirs = {"drain": [100.0, 110.0, 120.0], "latency": [1.0, 8.0, 9.0]}
    assert ratios([DRAIN, LATENCY], ours, {"peer": theirs}) == [
        Ratio("drain", "peer", 3.0, 3.0, 5.0),
        Ratio("latency", "peer", 4.0, 0.5, 4.5),
    ]


def test_nothing_beside_nothing_is_as_good() -> None:
    """No event was lost in either, say."""
    ours, theirs = {"latency": [0.0, 0.0]}, {"latency": [0.0, 2.0]}
    assert ratios([LATENCY], ours, {"peer": theirs}) == [Ratio("latency", "peer", inf, 1.0, inf)]
    assert ratios([DRAIN], {"drain": [0.0]}, {"peer": {"drain": [0.0]}})[0].value == 1.0


def test_a_target_is_met_missed_or_was_not_measured() -> None:
    found = [Ratio("drain", "peer", 3.0, 2.9, 5.0)]
    targets = [Target("drain", "peer", 3.0), Target("drain", "peer", 3.1), Target("drain", "absent", 1.0)]
    assert [verdict.met for verdict in verdicts(targets, found)] == [True, False, None]


def test_the_best_peer_is_the_one_surpassed_least_and_known_when_all_ran() -> None:
    found = [Ratio("drain", "slow", 9.0, 8.0, 9.0), Ratio("drain", "quick", 3.0, 2.9, 5.0)]
    among_both = Target("drain", "best", 3.0, among=("slow", "quick"))
    among_three = Target("drain", "best", 3.0, among=("slow", "quick", "absent"))
    assert [one.measured for one in verdicts([among_both, among_three], found)] == [3.0, None]


COST = Measure("cost", "cost", "µs/task", higher_is_better=False)


@pytest.mark.parametrize(
    ("now", "then", "times", "noise", "met"),
    [
        ([10.0, 10.4, 10.2], [10.1, 10.3, 10.2], 1.0, True, True),
        ([10.5, 10.6, 10.7], [10.0, 10.2, 10.4], 1.039, False, True),
        ([12.0, 11.0, 13.0], [10.0, 10.0, 10.0], 1.2, False, False),
        ([9.0, 12.0, 11.0], [10.0, 10.0, 10.0], 1.1, True, False),  # too much, and not sure: measure again
        ([8.0, 9.0, 8.0], [10.0, 10.0, 10.0], 0.8, False, True),
    ],
)
def test_a_change_says_how_much_it_is_and_whether_it_is_noise(
    now: list[float], then: list[float], times: float, noise: bool, met: bool
) -> None:
    (cost, drain) = changes(
        [COST, DRAIN, LATENCY], {"cost": now, "drain": now}, {"cost": then, "drain": then}
    )
    assert (round(cost.times, 3), cost.is_noise, cost.met) == (times, noise, met)
    assert (cost.now.median, cost.then.median) == (sorted(now)[1], sorted(then)[1])
    assert drain.met is None  # nothing is demanded of it


@dataclass(frozen=True)
class Fake:
    name: str
    drains: list[float]
    is_peer: bool = False

    def settings(self, home: Path) -> Mapping[str, str]:
        return {"version": "1"}


def fake_benchmark(ran: list[tuple[str, str]]) -> Benchmark[Fake]:
    def first(contender: Fake, home: Path, tasks: int) -> Mapping[str, float]:
        ran.append(("first", contender.name))
        assert list(home.iterdir()) == []
        return {"drain": contender.drains.pop(0)}

    def second(contender: Fake, home: Path, tasks: int) -> Mapping[str, float]:
        ran.append(("second", contender.name))
        return {"latency": 1.0}

    return Benchmark(
        name="fake",
        question="which is quicker?",
        contenders=(Fake("ours", [30.0, 31.0, 90.0]), Fake("theirs", [10.0, 10.0, 11.0])),
        stages={"first": first, "second": second},
        measures=(DRAIN, LATENCY),
        targets=(Target("drain", "theirs", 3.0),),
        tasks=7,
    )


def test_contenders_alternate_within_every_stage_of_every_round() -> None:
    ran: list[tuple[str, str]] = []
    fake_benchmark(ran).run(rounds=3, tasks=7)
    one_round = [("first", "ours"), ("first", "theirs"), ("second", "ours"), ("second", "theirs")]
    other_way = [("first", "theirs"), ("first", "ours"), ("second", "theirs"), ("second", "ours")]
    assert ran == [*one_round, *other_way, *one_round]


def test_a_part_can_be_run_alone_of_one_contender_or_all() -> None:
    ran: list[tuple[str, str]] = []
    fake_benchmark(ran).run(rounds=1, tasks=7, only=["second"])
    assert ran == [("second", "ours"), ("second", "theirs")]
    ran.clear()
    fake_benchmark(ran).run(rounds=1, tasks=7, only=["second", "theirs"])
    assert ran == [("second", "theirs")]


def test_with_json_one_object_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fake_benchmark([]).main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ratios"] == {"drain_vs_theirs": 3.1, "latency_vs_theirs": 1.0}
    assert printed["targets"] == {"drain_vs_theirs": {"at_least": 3.0, "measured": 3.1, "met": True}}
    assert printed["contenders"]["ours"]["measures"]["drain"] == {
        "median": 31.0,
        "low": 30.0,
        "high": 90.0,
        "values": [30.0, 31.0, 90.0],
    }
    assert printed["machine"]["cpus"] == os.cpu_count()


def test_people_get_aligned_columns_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert fake_benchmark([]).main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:6] == [
        "                            ours         theirs",
        "drain     tasks/s   31 (30 – 90)   10 (10 – 11)",
        "latency   ms           1 (1 – 1)      1 (1 – 1)",
    ]
    assert "target: drain at least 3 times theirs: 3.10, met" in lines


def test_the_subject_runs_beside_itself_at_another_commit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sources: list[Path] = []

    def former(subject: Fake, name: str, source: Path) -> Fake:
        sources.append(source)
        assert (source / "umbel" / "__init__.py").exists()
        return Fake(name, [20.0, 21.0, 22.0, 23.0, 24.0])

    ran: list[tuple[str, str]] = []
    compared = replace(
        fake_benchmark(ran), contenders=(Fake("ours", [20.0, 21.0, 30.0, 23.0, 24.0]),), at_commit=former
    )
    assert compared.main(["--against", "HEAD"]) == 0
    printed = capsys.readouterr().out
    name = ran[1][1]
    assert [one for stage, one in ran if stage == "first"][:4] == ["ours", name, name, "ours"]
    assert len(ran) == 5 * 2 * 2
    assert f"ours is so many times {name}" in printed
    assert "1.00 – 1.05 – 1.36" in printed and "noise" in printed
    assert not sources[0].exists()


def test_a_commit_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    compared = replace(fake_benchmark([]), at_commit=lambda subject, name, source: subject)
    assert compared.main(["--against", "no-such-commit"]) == 1
    assert "no-such-commit" in capsys.readouterr().err


def test_many_contenders_are_listed_under_each_measure(capsys: pytest.CaptureFixture[str]) -> None:
    few = fake_benchmark([])
    more = [Fake(f"peer {number}", [5.0, 5.0, 5.0]) for number in range(3)]
    many = replace(few, contenders=(*few.contenders, *more))
    assert many.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[3:5]] == ["drain", ""]
    assert "    theirs   10 (10 – 11)      3.10 (3.00 – 8.18)" in lines
    assert "    peer 2      5 (5 – 5)     6.20 (6.00 – 18.00)" in lines


def test_fewer_than_three_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fake_benchmark([]).main(["--rounds", "2"])
    assert "2 is less than 3" in capsys.readouterr().err


FAMILY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"


def test_a_process_ends_with_its_descendants_when_the_block_fails(tmp_path: Path) -> None:
    family: list[psutil.Process] = []

    def interrupted() -> None:
        command = [sys.executable, "-c", FAMILY]
        with running("worker", command, environment=dict(os.environ), directory=tmp_path) as worker:
            parent = psutil.Process(worker.process.pid)
            family.extend([parent, *wait_until(parent.children, what="the process to start another")])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(family) == 2
    wait_until(lambda: not any(_alive(one) for one in family), what="both processes to be gone")


def test_a_process_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('out of luck')"]
    with running("worker", command, environment=dict(os.environ), directory=tmp_path) as worker:
        wait_until(lambda: worker.process.poll() is not None, what="the process to end")
        with pytest.raises(BenchmarkFailed, match="worker ended by itself with status 1\nout of luck"):
            worker.check()


def test_a_client_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such task')"]
    with pytest.raises(BenchmarkFailed, match="client ended with status 1\nno such task"):
        answer_of("client", command, environment=dict(os.environ), directory=tmp_path, timeout_s=30.0)


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
