"""The same Celery project under `celery worker` and under `umbel worker`: every case has the same outcome.

`make test` runs a slice on Redis; `make soak` runs everything, on Redis and RabbitMQ, with every result
backend. What is known to differ is in `differences.py`.
"""

import json
import os
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from tests.celery_apps.deployments import KINDS, compare
from tests.celery_apps.differences import DIFFERENCES
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer

SOAK = bool(os.environ.get("UMBEL_SOAK"))
SETUPS = ["main", "late", "rpc", "database", "files", "cache", "django"] if SOAK else ["main"]
BROKERS = ["redis", "rabbitmq"] if SOAK else ["redis"]
LIMIT_S = 1800
CASES_MIN = 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    started.start()
    yield started
    started.stop()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("setup", SETUPS)
def test_cases_end_the_same_under_both_workers(
    setup: str, broker: str, tmp_path: Path, server: RedisServer
) -> None:
    brokers: dict[str, str] = {}
    if broker == "rabbitmq":
        rabbit = shared_server()
        brokers = {kind: rabbit.url(rabbit.new_vhost()) for kind in KINDS}
    found = compare(setup, tmp_path, "all" if SOAK else "quick", server, brokers)
    assert setup != "main" or not SOAK or len(found["celery"]) >= CASES_MIN
    wrong = list(judged(found["celery"], found["umbel"], (setup, broker)))
    about = f"{len(wrong)} of {len(found['celery'])} cases; logs are in {tmp_path}"
    assert not wrong, "\n".join([about, *wrong])


def judged(celery: dict[str, Any], umbel: dict[str, Any], where: tuple[str, str]) -> Iterator[str]:
    """A line or a diff for each case that is not as it should be."""
    for name, expected in celery.items():
        differs = umbel[name] != expected
        listed = any(one in DIFFERENCES for one in (name, *(f"{name} on {place}" for place in where)))
        if "celery.exceptions.TimeoutError" in json.dumps(expected):
            yield f"--- {name} {where}: nothing came of it under Celery, so it shows nothing"
        if differs and not listed:
            yield "\n".join([f"--- {name} {where}", *shown_diff(expected, umbel[name])])
        if listed and not differs:
            yield f"--- {name} {where} is listed in differences.py and does not differ"


def shown_diff(expected: Any, found: Any) -> Iterator[str]:
    before, after = (json.dumps(value, indent=1).splitlines() for value in (expected, found))
    yield from unified_diff(before, after, "celery", "umbel", n=2, lineterm="")


HERE = ("main", "redis")


def verdicts(monkeypatch: pytest.MonkeyPatch, celery: dict[str, Any], umbel: dict[str, Any]) -> list[str]:
    monkeypatch.setitem(globals(), "DIFFERENCES", {"known": "why", "known_here on redis": "why"})
    return [line.splitlines()[0] for line in judged(celery, umbel, HERE)]


def test_a_case_that_differs_is_found_unless_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    celery = {"equal": 1, "known": 1, "known_here": 1, "new": ["a", 1]}
    umbel = {"equal": 1, "known": 2, "known_here": 2, "new": ["a", 2]}
    assert verdicts(monkeypatch, celery, umbel) == [f"--- new {HERE}"]


def test_a_listed_case_that_does_not_differ_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"known": 1, "known_here": 1}
    wanted = [f"--- {name} {HERE} is listed in differences.py and does not differ" for name in found]
    assert verdicts(monkeypatch, found, found) == wanted


def test_a_case_that_shows_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"waits": {"raises": ["celery.exceptions.TimeoutError", "The operation timed out."]}}
    (line,) = verdicts(monkeypatch, found, found)
    assert line.startswith("--- waits") and "under Celery" in line


def test_the_guide_names_every_difference() -> None:
    guide = (Path(__file__).parents[2] / "docs/celery.md").read_text()
    assert [why for why in DIFFERENCES.values() if why not in guide] == []
