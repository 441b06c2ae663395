"""What may be installed beside: doctor knows all of it, and commands that want it say how to get it."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.cli.running import Umbel
from umbel.cli import exits
from umbel.cli.run.demo import skips
from umbel.cli.run.doctor import EXTRAS, Extra

ROOT = Path(__file__).resolve().parents[2]


def found(umbel: Umbel, check: str) -> tuple[int, str, str]:
    ran = umbel("doctor", "--json")
    [one] = [one for one in json.loads(ran.out) if one["check"] == check]
    return ran.code, one["verdict"], one["detail"]


def test_doctor_knows_every_extra_with_what_it_brings(umbel: Umbel) -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(EXTRAS) == sorted(stated.keys() - {"all"})
    for name, requirements in stated.items():
        brought = {re.split(r"[\[><=;]", one)[0] for one in requirements} - {"umbel"}
        assert name == "all" or brought <= set(EXTRAS[name].packages), name
    checks = [one["check"] for one in json.loads(umbel("doctor", "--json").out)]
    assert {f"umbel[{name}]" for name in EXTRAS} <= set(checks)


def test_all_is_every_extra_but_those_that_the_first_steps_name() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.fullmatch(r"umbel\[(.*)\]", *stated["all"])
    assert named is not None
    left_out = EXTRAS.keys() - set(named[1].split(","))
    line = "$ pip install 'umbel[all]'         # with everything but "
    assert line + "celery, connect and java\n" in (ROOT / "docs" / "first-steps.md").read_text()
    assert left_out == {"celery", "connect", "java"}


def test_doctor_says_how_to_install_what_is_missing(umbel: Umbel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"nothing": Extra("a use", ("no-such-a",)), "half": Extra("another", ("click", "no-such-b"))}
    monkeypatch.setattr("umbel.cli.run.doctor.EXTRAS", made)
    remedy = "a use: not installed; pip install 'umbel[nothing]'"
    assert found(umbel, "umbel[nothing]") == (exits.OK, "note", remedy)
    assert found(umbel, "umbel[half]")[2] == "another: without no-such-b; pip install 'umbel[half]'"


def test_the_demo_goes_on_without_what_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert not skips("the dashboard", "web", missing=False)
    assert skips("the Celery app", "celery", missing=True)
    line = "umbel: the Celery app is skipped; it needs `pip install 'umbel[celery]'`\n"
    assert capsys.readouterr() == ("", line)
