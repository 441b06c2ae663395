"""`umbel simulate`: figures, replay, and what it says when a promise is broken."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.sim import full
from tests.sim.mutants import ActsBeforeStart
from umbel.cli import exits
from umbel.cli.run import simulate
from umbel.protocol.election.election import Elections
from umbel.protocol.election.table import ElectionSettings
from umbel.sim.node import Node
from umbel.sim.rounds import TOPICS, Cluster


def umbel_simulate(*arguments: str) -> Result:
    return CliRunner().invoke(simulate.command, arguments, standalone_mode=False)


def figures(*arguments: str) -> Any:
    result = umbel_simulate(*arguments, "--json")
    assert result.return_value == exits.OK, result.output
    return json.loads(result.stdout)


def test_it_prints_what_elections_cost_and_how_long_they_take() -> None:
    told = figures("--nodes", "4", "--elections", "120", "--faults", "none", "--seed", "7")
    assert told["elections"] == told["runs"] == 120
    assert told["publishes_per_election"] < 3.1
    assert 4 <= told["store_calls_per_election"] < 4.4
    assert 0 < told["decision_s"]["p50"] <= told["decision_s"]["p99"] < 2
    assert told["violations"] == []


def test_a_seed_gives_the_same_trace_every_time() -> None:
    arguments = ("--nodes", "3", "--elections", "50", "--seed", "x")
    hashes = [figures(*arguments)["trace_hash"] for _ in range(2)]
    assert hashes[0] == hashes[1] != figures(*arguments[:-1], "y")["trace_hash"]


def test_a_round_is_replayed_by_its_number() -> None:
    arguments = ("--nodes", "3", "--elections", "250", "--faults", "crash")
    assert figures(*arguments, "--replay", "7:1")["elections"] == 50
    again = [figures(*arguments, "--replay", "7:0")["trace_hash"] for _ in range(2)]
    assert again[0] == again[1]


def test_a_broken_promise_fails_with_its_seed_and_a_small_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Cluster, "make_elections", _acting_before_start)
    result = umbel_simulate("--nodes", "3", "--elections", "30", "--seed", "7", "--json")
    assert result.return_value == exits.FAILED
    told = json.loads(result.stdout)
    assert told["violations"][0]["promise"] == "KS1"
    assert len(told["script"]["asks"]) <= 2
    assert "7:0" in result.stderr
    script = tmp_path / "script.json"
    script.write_text(json.dumps(told["script"]))
    replayed = umbel_simulate("--replay", str(script), "--json")
    assert replayed.return_value == exits.FAILED
    assert json.loads(replayed.stdout)["violations"][0]["promise"] == "KS1"


def _acting_before_start(cluster: Cluster, node: Node) -> Elections:
    return ActsBeforeStart(node.name, node.holder, TOPICS, ElectionSettings(), cluster.world.random.uniform)


def test_an_unknown_fault_is_named_with_those_that_exist() -> None:
    result = umbel_simulate("--faults", "gremlins")
    assert "gremlins" in str(result.exception) and "crash-after-grant" in str(result.exception)


def test_a_replay_of_nothing_is_refused() -> None:
    result = umbel_simulate("--replay", "nowhere.json")
    assert "nowhere.json" in str(result.exception)


def test_celerys_rules_are_simulated_for_contrast() -> None:
    told = figures("--protocol", "v1", "--nodes", "5", "--elections", "100")
    assert told["failed_share"] > 0


def test_faults_are_explained() -> None:
    assert "the store forgets everything" in figures("--list-faults")["amnesia"]


def test_parts_of_the_full_set_are_run_by_their_names() -> None:
    assert {job[0] for job in full.chosen(["mutants", "exhaustive"])} == {full.mutants, full.exhaustive}
    assert full.chosen([]) == full.jobs()
    with pytest.raises(SystemExit, match="no part 'gremlins'; one of celerys_rules, exhaustive"):
        full.chosen(["gremlins"])
