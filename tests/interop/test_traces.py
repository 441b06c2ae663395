"""A call that crosses from one library's processes to the other's, and back, is one trace."""

import json
from typing import Any

from tests.interop.conftest import Crossing
from tests.interop.mixed_cluster import MixedCluster
from tests.waiting import wait_until

Span = dict[str, Any]


def spans_of(cluster: MixedCluster, trace: str, count: int) -> dict[str, Span]:
    """By their names; each process exports in its own time."""

    def read() -> list[Span]:
        files = (cluster.home / "spans").glob("*.jsonl")
        lines = [line for one in files for line in one.read_text().splitlines(keepends=True)]
        spans = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in spans if one["trace"] == trace]

    wait_until(lambda: len(read()) >= count, what=f"{count} spans of trace {trace}")
    found = read()
    by_name = {one["name"]: one for one in found}
    assert len(by_name) == len(found) == count, found
    return by_name


def test_a_task_that_sends_another_is_one_trace(cluster: MixedCluster, crossing: Crossing) -> None:
    trace, _ = crossing("in_one_span(lambda: get(sends.apply_async((there,), queue=here)))")
    spans = spans_of(cluster, trace, 5)
    path = [
        "request",
        "apply_async/{}.sends",
        "run/{}.sends",
        "apply_async/{}.about_itself",
        "run/{}.about_itself",
    ]
    names = [one.format("shared_tasks") for one in path]
    assert [spans[one]["parent"] for one in names] == [None, *(spans[one]["span"] for one in names[:-1])]
    libraries = [crossing.client.library] * 2 + [crossing.first] * 2 + [crossing.second]
    assert [spans[one]["library"] for one in names] == libraries
    ours = spans["run/shared_tasks.sends" if crossing.first == "umbel" else "run/shared_tasks.about_itself"]
    assert ours["attributes"]["umbel.node"].startswith("umbel@")
    assert ours["attributes"]["umbel.clock"] > 0


def test_a_chain_is_one_trace(cluster: MixedCluster, crossing: Crossing) -> None:
    steps = "chain(where.si().set(queue=here), where_and.s().set(queue=there))"
    trace, found = crossing(f"in_one_span(lambda: get({steps}.apply_async()))")
    assert found == [crossing.second, crossing.first]
    spans = spans_of(cluster, trace, 5)
    path = ["request", "apply_async/{}.where", "run/{}.where", "apply_async/{}.where_and", "run/{}.where_and"]
    names = [one.format("shared_tasks") for one in path]
    assert [spans[one]["parent"] for one in names] == [None, *(spans[one]["span"] for one in names[:-1])]
