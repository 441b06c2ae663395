"""docs/security-asvs.md: each requirement of level 2 once, with a verdict, and tests that exist."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security-asvs.md").read_text()
ROW = re.compile(r"\| (\d+\.\d+\.\d+[^|]*?) \| (pass|partly|fail|–) \|(?: (.*))? \|")
TEST = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)::(test_\w+)`")
# How many requirements of level 1 and 2 each section of version 5.0.0 has; they are numbered from 1.
SECTIONS = {
    "1.1": 2,
    "1.2": 9,
    "1.3": 11,
    "1.4": 3,
    "1.5": 2,
    "2.1": 3,
    "2.2": 3,
    "2.3": 4,
    "2.4": 1,
    "3.2": 2,
    "3.3": 4,
    "3.4": 6,
    "3.5": 5,
    "3.7": 2,
    "4.1": 3,
    "4.2": 1,
    "4.3": 2,
    "4.4": 4,
    "5.1": 1,
    "5.2": 3,
    "5.3": 2,
    "5.4": 3,
    "6.1": 3,
    "6.2": 12,
    "6.3": 4,
    "6.4": 4,
    "6.5": 5,
    "6.6": 3,
    "6.8": 4,
    "7.1": 3,
    "7.2": 4,
    "7.3": 2,
    "7.4": 5,
    "7.5": 2,
    "7.6": 2,
    "8.1": 2,
    "8.2": 3,
    "8.3": 1,
    "8.4": 1,
    "9.1": 3,
    "9.2": 4,
    "10.1": 2,
    "10.2": 2,
    "10.3": 4,
    "10.4": 11,
    "10.5": 5,
    "10.6": 2,
    "10.7": 3,
    "11.1": 2,
    "11.2": 3,
    "11.3": 3,
    "11.4": 4,
    "11.5": 1,
    "11.6": 1,
    "12.1": 3,
    "12.2": 2,
    "12.3": 4,
    "13.1": 1,
    "13.2": 5,
    "13.3": 2,
    "13.4": 5,
    "14.1": 2,
    "14.2": 4,
    "14.3": 3,
    "15.1": 3,
    "15.2": 3,
    "15.3": 7,
    "16.1": 1,
    "16.2": 5,
    "16.3": 4,
    "16.4": 3,
    "16.5": 3,
    "17.1": 1,
    "17.2": 4,
    "17.3": 2,
}


def requirements(named: str) -> list[str]:
    """Those that the first cell of a row names: `1.2.6–1.2.8 LDAP` are three."""
    found: list[str] = []
    for first, last in re.findall(r"(\d+\.\d+\.\d+)(?:–\d+\.\d+\.(\d+))?", named):
        section, _, number = first.rpartition(".")
        found += [f"{section}.{place}" for place in range(int(number), int(last or number) + 1)]
    return found


def rows() -> list[tuple[str, str, str]]:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| \d", line)]
    found = [(line, ROW.fullmatch(line)) for line in lines]
    assert not [line for line, row in found if row is None]
    return [(row[1], row[2], row[3] or "") for _, row in found if row is not None]


@cache
def functions_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_each_requirement_of_level_2_is_judged_once() -> None:
    wanted = [f"{section}.{number}" for section, count in SECTIONS.items() for number in range(1, count + 1)]
    assert len(wanted) == 253
    found = [requirement for named, _, _ in rows() for requirement in requirements(named)]
    assert Counter(found) == Counter(wanted)


def test_only_the_second_factor_fails_and_each_limit_has_its_reason() -> None:
    verdicts = Counter(verdict for _, verdict, _ in rows())
    assert [named for named, verdict, _ in rows() if verdict == "fail"] == ["6.3.3 second factor"]
    assert verdicts["pass"] > verdicts["partly"] > 0
    for named, verdict, why in rows():
        assert verdict == "–" or why.strip(), named
        assert verdict != "partly" or TEST.sub("", why).strip(" ;,"), named


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 80
    for file, test in named:
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "web" / file
        assert test in functions_in(path), f"{file}::{test}"
    assert PAGE.count("::test_") == len(named)
