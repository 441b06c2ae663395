"""Writes the pages of docs/ that are made from the code; a test holds them to it."""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
import msgspec

from scripts import api_page
from umbel.app.settings import Settings
from umbel.celery.settings_table import TABLE
from umbel.cli.main import COMMANDS

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- made by `make docs`; do not edit -->"
SETTINGS_HEAD = f"""# Settings

{MADE}

Later sources win: defaults, `[tool.umbel]` in `pyproject.toml`, `App(…)`, `UMBEL_*` variables (the name in
capitals), a command's flags. An unknown or ill-typed setting is an error that names it. In a
variable a list is written with commas or as JSON, a map as JSON. Names end in their unit: `_s` is seconds.

```toml
[tool.umbel]
task_default_queue = "shop"
worker_concurrency = 4
task_routes = {{ "reports.*" = "slow", "mail.send" = {{ queue = "mail", priority = 2 }} }}
```
"""
SETTINGS_FOOT = """`UMBEL_APP` (the app) and `UMBEL_RUN_DIR` (the directory of the workers' state files)
are read by commands."""


def settings_page() -> str:
    lines = [SETTINGS_HEAD, "| setting | type | default | |", "|---|---|---|---|"]
    fields = {field.name: field for field in msgspec.structs.fields(Settings)}
    for name, meaning in setting_texts().items():
        field = fields[name]
        lines.append(f"| `{name}` | {_type(field.type)} | {_default(field.default)} | {meaning} |")
    lines += ["", SETTINGS_FOOT]
    return "\n".join(lines) + "\n"


def setting_texts() -> dict[str, str]:
    """What each setting means: the comment above it."""
    texts: dict[str, str] = {}
    comment: list[str] = []
    for line in textwrap.dedent(inspect.getsource(Settings)).splitlines():
        if found := re.fullmatch(r"    # (.*)", line):
            comment.append(found[1])
        elif (found := re.match(r"    (\w+): ", line)) and comment:
            texts[found[1]] = " ".join(comment)
            comment = []
        else:
            comment = []
    return texts


CELERY_HEAD = f"""# Celery's settings

{MADE}

What becomes of each of Celery 5.7's settings when `umbel worker -A proj` runs a Celery project. Where the
value decides, `umbel celery check -A proj` says what holds for yours; a worker refuses to start with what it
cannot honour. `becomes` names the [setting](settings.md) of Umbel's that it is mapped to.
"""


def celery_page() -> str:
    lines = [CELERY_HEAD, "| setting | verdict | |", "|---|---|---|"]
    for name, row in sorted(TABLE.items()):
        lines.append(f"| `{name}` | {row.judged.verdict} | {row.judged.note} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    lines = ["# Every command", "", MADE, "", "[commands.md](commands.md) says what they are for.", ""]
    for name, place in COMMANDS.items():
        command = place.load()
        for path, one in _with_below(f"umbel {name}", command):
            lines += _section(path, one)
    return "\n".join(lines).rstrip() + "\n"


def _with_below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from _with_below(f"{path} {name}", below)


def _section(path: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    about = (command.help or "").replace("\b\n", "").strip()
    lines = [
        f"## {path}",
        "",
        "```text",
        usage,
        "```",
        "",
        *(line.strip() for line in about.splitlines()),
        "",
    ]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if options:
        lines += ["| option | |", "|---|---|", *map(_option, options), ""]
    return lines


def _option(option: click.Option) -> str:
    spellings = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
    default = (
        ""
        if option.default in (None, False, (), "") or callable(option.default)
        else f" (default: {option.default})"
    )
    shown = (
        default if type(option.default) in (int, float, str, bool) or isinstance(option.default, Path) else ""
    )
    return f"| {spellings} | {(option.help or '').replace('|', '&#124;')}{shown} |"


def _type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _type(get_args(hint)[0])
    if get_origin(hint) is None:
        return str(hint.__name__)
    if str(get_origin(hint)) == "typing.Literal":
        return " or ".join(f"`{one}`" for one in get_args(hint))
    if get_origin(hint) in (tuple, list):
        return "list"
    if get_origin(hint) is dict:
        return "map"
    return " or ".join(_type(one) for one in get_args(hint) if one is not type(None))


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT or value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if value < 1e6 else f"{value:,.0f}"
    return f"`{', '.join(value) if isinstance(value, tuple) else value}`"


PAGES = {
    "settings.md": settings_page,
    "command-reference.md": commands_page,
    "celery-settings.md": celery_page,
    "api.md": api_page.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    sys.exit(0)
