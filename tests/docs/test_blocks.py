"""Blocks outside the story of the guide: commands that exist, settings that can be used."""

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from tests.docs.blocks import ROOT, Block, blocks_of, pages
from umbel import App
from umbel.cli.main import COMMANDS

READ = [*pages(), ROOT / "README.md"]


def typed() -> list[tuple[str, str]]:
    """Every line that begins with `umbel`, and where it stands."""
    blocks = [block for page in READ for block in blocks_of(page) if block.language == "console"]
    lines = [
        (command.line, block.place)
        for block in blocks
        if block.text.startswith("$ ")
        for command in block.commands
    ]
    return [(line, place) for line, place in lines if line.startswith("umbel ")]


def of_language(language: str) -> list[Block]:
    return [block for page in READ for block in blocks_of(page) if block.language == language]


def test_every_line_of_a_terminal_begins_with_its_prompt() -> None:
    """Of `make` alone the README shows what is typed, with what it is for."""
    bare = [block.place for block in of_language("console") if not re.match(r"\$ |make ", block.text)]
    assert not bare


@pytest.mark.parametrize(("line", "place"), typed(), ids=lambda value: str(value)[:60])
def test_commands_and_options_that_are_typed_exist(line: str, place: str) -> None:
    words = shlex.split(line.removesuffix("&"))[1:]
    assert words[0] in COMMANDS, place
    command: click.Command = COMMANDS[words[0]].load()
    context = click.Context(command)
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        below = command.get_command(context, rest[0])
        if below is None:
            break
        command, rest = below, rest[1:]
    known = {
        spelling
        for option in command.get_params(context)
        for spelling in (*option.opts, *option.secondary_opts)
    }
    used = {word.partition("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)}
    assert used <= known, f"{place}: {line}"


@pytest.mark.parametrize("block", of_language("toml"), ids=lambda block: block.place)
def test_settings_that_are_shown_can_be_used(block: Block, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(block.text)
    app = App("shop", directory=tmp_path)
    for name, value in tomllib.loads(block.text)["tool"]["umbel"].items():
        assert getattr(app.settings, name) == value
