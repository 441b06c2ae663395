"""The documents name what there is: every setting, every command with its options, every part."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from scripts import reference
from scripts.screenshots import BYTES_MAX, PICTURES
from umbel.app.settings import Settings
from umbel.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
TOPS = [ROOT, ROOT / "docs", ROOT / "src/umbel", ROOT / "src/umbel/brokers"]
PICTURE = re.compile(r"_static/([\w-]+\.\w+)")
SAID_FOR_ALL = {"--app", "--json", "--help", "--broker", "--run-dir"}  # above and below the table of commands


def text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_what_is_made_from_the_code_is_up_to_date(name: str) -> None:
    assert text(f"docs/{name}") == reference.PAGES[name](), "run: make docs"


def test_the_api_page_lists_public_methods_of_the_app_only() -> None:
    """A method for other parts of Umbel has an underscore, or is in INTERNAL of `scripts/api_page.py`."""
    listed = set(re.findall(r"^### App\.(\w+)$", text("docs/api.md"), re.MULTILINE))
    assert listed == {
        *("control", "task", "autodiscover_tasks", "signature", "periodic", "election_handler", "lease"),
        *("send_task", "send_many", "asend_task", "asend_many", "outbox", "eager", "close", "aclose"),
        *("AsyncResult", "GroupResult"),
    }


def test_every_setting_is_explained() -> None:
    assert sorted(reference.setting_texts()) == sorted(
        field.name for field in msgspec.structs.fields(Settings)
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_listed_with_its_options(name: str) -> None:
    table, asking = text("docs/commands.md").split("## Asking workers")
    rows = "\n".join(re.findall(rf"^\| `umbel {name}\b.*$", table, re.MULTILINE))
    assert rows, f"docs/commands.md has no row for 'umbel {name}'"
    for spellings in options_of(COMMANDS[name].load()):
        named = any(re.search(rf"`{spelling}\b", rows + asking) for spelling in spellings)
        assert named or not SAID_FOR_ALL.isdisjoint(spellings), f"umbel {name} {spellings}"


def options_of(command: click.Command) -> Iterator[list[str]]:
    """The spellings of each option, those of its sub-commands included."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield parameter.opts
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from options_of(below)


@pytest.mark.parametrize(
    ("name", "named_at_least"),
    [
        ("operating", {"health", "queues"}),
        ("kubernetes", {"worker", "health", "web"}),
        ("systemd", {"worker", "health", "web"}),
    ],
)
def test_operating_names_commands_and_options_that_exist(name: str, named_at_least: set[str]) -> None:
    """In running text, in a unit file and in the arrays of a manifest."""
    page = re.sub(r"[\"',\[\]]+", " ", text(f"docs/{name}.md"))
    calls = re.findall(r"umbel +([a-z]+)((?: +(?:-{1,2}[a-z][a-z-]*|[\w:@%./]+))*)", page)
    named = [
        (command, set(re.findall(r"(?<= )-{1,2}[a-z][a-z-]*", rest)))
        for command, rest in calls
        if command in COMMANDS
    ]
    assert named_at_least <= {command for command, _ in named}
    for command, options in named:
        known = {spelling for spellings in options_of(COMMANDS[command].load()) for spelling in spellings}
        assert options <= known, f"docs/{name}.md: umbel {command} {options - known}"


def test_the_architecture_names_every_part() -> None:
    parts = {path.parent.name for path in (ROOT / "src/umbel").glob("*/__init__.py")}
    named = re.findall(r"^\| `(\w+)/` \|", text("docs/architecture.md"), re.MULTILINE)
    assert sorted(named) == sorted(parts)


def test_the_architecture_names_every_folder_of_a_part() -> None:
    rows = dict(re.findall(r"^\| `(\w+)/` \|(.*)$", text("docs/architecture.md"), re.MULTILINE))
    folders = [path.parent for path in (ROOT / "src/umbel").glob("*/*/__init__.py")]
    unnamed = [
        f"{one.parent.name}/{one.name}" for one in folders if f"`{one.name}/`" not in rows[one.parent.name]
    ]
    assert folders and not unnamed


def test_the_architecture_names_every_step() -> None:
    steps = {path.stem for path in (ROOT / "src/umbel/worker/steps").glob("[!_]*.py")}
    assert steps <= set(re.findall(r"\*\*(\w+)\*\*", text("docs/architecture.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """`coordination/driver.py`, from wherever one looks; `./tasks.py` is the reader's own."""
    for name in re.findall(r"`(?!\./)([\w./-]+/[\w.-]+\.(?:py|lua|md))`", page.read_text()):
        assert any(found.is_file() for top in TOPS for found in top.glob(name)), f"{page.name} names {name}"


def test_every_picture_is_taken_by_the_script_is_shown_and_is_small() -> None:
    there = {
        one.name: one.stat().st_size for one in (ROOT / "docs/_static").iterdir() if one.suffix != ".css"
    }
    assert sorted(there) == sorted(PICTURES), "run: make pictures"
    assert {name for page in PAGES for name in re.findall(PICTURE, page.read_text())} == set(PICTURES)
    assert {name: size for name, size in there.items() if size > BYTES_MAX} == {}


def test_pictures_are_shown_in_the_colours_that_the_reader_prefers() -> None:
    for page in PAGES:
        shown = re.findall(PICTURE, page.read_text())
        pairs = [(shown[at], shown[at + 1]) for at in range(0, len(shown), 2)]
        assert all(dark.replace("-dark", "-light") == light for dark, light in pairs), page.name
