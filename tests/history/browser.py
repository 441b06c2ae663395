"""Chromium without a window: the page as it stands after rendering, what it logged, a picture of it."""

import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
TIMEOUT_S = 60.0


@dataclass
class Shown(HTMLParser):
    """What a browser made of a page: texts by element, tables by id, and the elements it saw."""

    html: str
    console: list[str] = field(default_factory=list)
    elements: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._path: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag in {"meta", "br", "hr"}:
            return
        self._path.append((tag, dict(attrs)))
        table = self._within("table")
        if table is not None and table.get("id") and tag in {"tr", "td", "th"}:
            rows = self.tables.setdefault(str(table["id"]), [])
            rows.append([]) if tag == "tr" else rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if self._path and self._path[-1][0] == tag:
            self._path.pop()

    def handle_data(self, data: str) -> None:
        section, table, card = self._within("section"), self._within("table"), self._within("div")
        if section is not None:
            name = str(section["id"])
            self.sections[name] = self.sections.get(name, "") + data
        if card is not None and card.get("data-figure") and self._within("dd") is not None:
            self.figures[str(card["data-figure"])] = data
        cell = self._within("td") is not None or self._within("th") is not None
        if table is not None and table.get("id") and cell and self._within("svg") is None:
            self.tables[str(table["id"])][-1][-1] += data

    def _within(self, tag: str) -> dict[str, str | None] | None:
        return next((attributes for name, attributes in reversed(self._path) if name == tag), None)


def show(page: Path, home: Path, *flags: str) -> Shown:
    """Open the page, let it render, and take it back out."""
    done = _run(page, home, "--dump-dom", *flags)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Shown(done.stdout, console)


def picture(page: Path, home: Path, file: Path, *, width: int = 1100, height: int = 3600) -> bytes:
    _run(page, home, f"--screenshot={file}", f"--window-size={width},{height}")
    return file.read_bytes()


def _run(page: Path, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["chromium", *FLAGS, "--enable-logging=stderr", f"--user-data-dir={home}", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
