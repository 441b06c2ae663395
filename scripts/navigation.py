"""The order of the documents: lists of links in the index pages of docs/, readable on GitHub as well.

`docs/index.md` has one section for each part of the site. An entry is `- [Title](page.md): one line`. A page
that is called `index.md` itself lists the pages below it. The site's menu, its llms.txt and the tests all
come from here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

DOCS = Path(__file__).parent.parent / "docs"
ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w./-]+\.md)\)(?:: (?P<about>.+))?$")


@dataclass(frozen=True)
class Entry:
    title: str
    page: str  # from docs/: "protocol/lease.md"
    about: str = ""
    below: tuple["Entry", ...] = ()

    def walk(self) -> Iterator["Entry"]:
        yield self
        for entry in self.below:
            yield from entry.walk()


@dataclass
class Section:
    title: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def pages(self) -> list[str]:
        return [one.page for entry in self.entries for one in entry.walk()]


def sections(docs: Path = DOCS) -> list[Section]:
    """The sections of the start page that list pages, in order."""
    found = sections_of((docs / "index.md").read_text(encoding="utf-8"), "index.md")
    return [Section(one.title, [_with_below(entry, docs) for entry in one.entries]) for one in found]


def sections_of(text: str, page: str) -> list[Section]:
    """What one page lists, by heading; links are taken from where the page lies."""
    found = [Section("")]
    for line in text.splitlines():
        if line.startswith("## "):
            found.append(Section(line.removeprefix("## ").strip()))
        elif match := ENTRY.match(line):
            target = str(PurePosixPath(page).parent / match["page"])
            found[-1].entries.append(Entry(match["title"], target, match["about"] or ""))
    return [section for section in found if section.entries]


def _with_below(entry: Entry, docs: Path) -> Entry:
    if PurePosixPath(entry.page).name != "index.md":
        return entry
    listed = sections_of((docs / entry.page).read_text(encoding="utf-8"), entry.page)
    below = tuple(one for section in listed for one in section.entries)
    return Entry(entry.title, entry.page, entry.about, below)
