"""Every case of the corpus through the readers alone: a value or an error that is ours (N1)."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.corpus.case import BROKERS, FOLDER, Case, as_line, cases, read
from tests.corpus.readers import REFUSALS, read_case

ONCE = ("frame", "result", "event", "control", "reply")  # the same bytes on every broker


def test_the_corpus_is_large_and_every_kind_and_broker_has_its_share() -> None:
    kinds = Counter(case.kind for case in cases())
    assert sum(kinds.values()) >= 150
    assert min(kinds.values()) >= 20 and len(kinds) == 7
    assert all(sum(broker in case.brokers for case in cases()) >= 150 for broker in BROKERS)


def test_no_two_cases_have_the_same_name() -> None:
    assert [name for name, count in Counter(case.name for case in cases()).items() if count > 1] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.stem)
def test_lines_are_in_the_order_of_their_names(path: Path) -> None:
    """So that two branches that add cases rarely add them at the same place."""
    names = [case.name for case in read(path)]
    assert names == sorted(names)


def test_a_line_with_an_unknown_field_or_kind_is_refused(tmp_path: Path) -> None:
    good = {"name": "x", "about": "y", "expect": "dead"}
    (tmp_path / "task.jsonl").write_text(json.dumps(good) + "\n")
    assert [(case.name, case.kind) for case in read(tmp_path / "task.jsonl")] == [("x", "task")]
    (tmp_path / "task.jsonl").write_text(json.dumps({**good, "boddy": ""}) + "\n")
    with pytest.raises(msgspec.ValidationError, match="boddy"):
        read(tmp_path / "task.jsonl")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(good) + "\n")
    with pytest.raises(msgspec.ValidationError, match="tasks"):
        read(tmp_path / "tasks.jsonl")


def test_a_case_of_a_fuzzer_is_read_as_it_was(tmp_path: Path) -> None:
    for case in cases():
        (path := tmp_path / f"{case.kind}.jsonl").write_text(as_line(case) + "\n")
        assert read(path) == [replace(case, reason="")]


@pytest.mark.parametrize("broker", BROKERS)
def test_a_reader_returns_a_value_or_raises_its_own_error(broker: str) -> None:
    """What a case may not do is listed by its name, so that one failure does not hide the others."""
    wrong = {}
    for case in cases():
        if broker not in case.brokers and not (case.kind in ONCE and broker == "sqlite"):
            continue
        try:
            found = read_case(case, broker)
        except REFUSALS as error:
            wrong[case.name] = "" if _may_refuse(case, broker) else f"refused: {error}"
        except Exception as error:
            wrong[case.name] = f"raised {error!r:.200}"
        else:
            wrong[case.name] = _wrong_value(case, found)
    assert {name: what for name, what in wrong.items() if what} == {}


def _may_refuse(case: Case, broker: str) -> bool:
    return case.expected.get(broker, case.expected.get("else")) != "runs"


def _wrong_value(case: Case, found: object) -> str:
    if case.kind != "frame":
        return ""
    what = "waits" if not found else "runs"
    return "" if case.expected["else"] == what else f"{what}: {found!r:.200}"
