"""What a public project says about itself agrees with itself: versions, addresses, names of the code."""

import re
import tomllib
from pathlib import Path

import pytest

from umbel.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
SAYS_WHERE = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    ".github/ISSUE_TEMPLATE/config.yml",
]
WORDS_OF_MAKE = re.compile(r"(?:`|\$ |run: )make ([a-z]+)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pythons() -> list[str]:
    return re.findall(r":: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_ci_runs_every_python_that_we_say_we_support() -> None:
    (matrix,) = re.findall(r"^ +python: \[(.+)\]$", text(".github/workflows/ci.yml"), re.MULTILINE)
    assert re.findall(r'"(.+?)"', matrix) == pythons()


def test_the_tests_of_versions_know_every_python_too() -> None:
    (versions,) = re.findall(r"VERSIONS:-([\d. ]+) pyodide", text("scripts/versions"))
    assert versions.split() == pythons()


def test_the_newest_dated_section_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d", headings[1])


@pytest.mark.parametrize("name", SAYS_WHERE)
def test_the_repository_has_one_address(name: str) -> None:
    """That of pyproject.toml; nothing else of ours lies on that site."""
    for address in re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", text(name)):
        assert address == REPOSITORY


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/releasing.md",
        ".github/workflows/ci.yml",
        ".github/workflows/release.yml",
    ],
)
def test_targets_that_are_named_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", text("Makefile"), re.MULTILINE))
    named = set(WORDS_OF_MAKE.findall(text(name)))
    assert named and named <= targets


def test_what_contributors_are_told_to_add_to_is_there() -> None:
    """Names rather than places, because files move."""
    guide = "".join(
        re.findall(r"^## Adding .+?(?=^## [^A])", text("CONTRIBUTING.md"), re.DOTALL | re.MULTILINE)
    )
    names = set(re.findall(r"`([A-Z][A-Za-z]+|[A-Z]{2,}|[a-z]+_[a-z_]+)`", guide))
    assert {"Broker", "PoolContract", "COMMANDS", "TABLES", "fold_bucket"} <= names
    code = "\n".join(path.read_text() for top in ("src", "tests") for path in (ROOT / top).rglob("*.py"))
    for name in names - {"tests"}:
        assert re.search(rf"^\s*(?:class|def|async def) {name}\b|^{name}\b.* = ", code, re.MULTILINE), name
