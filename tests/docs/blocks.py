"""The code blocks of a document, and what an HTML comment above one says about running it.

Readers do not see these comments, on GitHub or on the site:

    <!-- not run: why -->          a block that a test cannot run
    <!-- runs until: name -->      code without an end: it is stopped once the file of that name is there
    <!-- numbers vary -->          such lines are printed, with other numbers in them
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Command:
    """One `$ line` of a terminal, and what it prints."""

    line: str
    printed: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    place: str  # docs/tasks.md:12
    language: str
    text: str
    mark: str

    @property
    def why_not_run(self) -> str:
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run:") else ""

    @property
    def runs_until(self) -> str:
        return self.mark.removeprefix("runs until: ") if self.mark.startswith("runs until:") else ""

    @property
    def numbers_vary(self) -> bool:
        return self.mark == "numbers vary"

    @cached_property
    def commands(self) -> list[Command]:
        assert self.text.startswith("$ "), f"{self.place}: a terminal's lines begin with '$ '"
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        return [_command(part) for part in parts]


def _command(part: str) -> Command:
    line, *printed = part.splitlines()
    return Command(re.sub(r" +# .*$", "", line), tuple(printed))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start('language')) + 1}",
            match["language"],
            dedent(match["text"]),
            match["mark"] or "",
        )
        for match in FENCE.finditer(text)
    ]


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))
