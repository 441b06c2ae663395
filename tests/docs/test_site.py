"""The documentation site: built once, whole, from this repository alone, and fit for a phone."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts import links, navigation
from tests.history.browser import FLAGS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ["index.md", *(page for section in navigation.sections() for page in section.pages)]
PHONE_PX = 390
# How far to the right each page reaches, but for what lies in a table that scrolls.
WIDTHS = """[...document.querySelectorAll("iframe")].map(frame => Math.max(
    ...[...frame.contentDocument.querySelectorAll("article :is(p, li, h1, h2, h3, pre, .table-wrapper)")]
        .filter(element => !element.parentElement.closest(".table-wrapper"))
        .map(element => element.getBoundingClientRect().right))).join(" ")"""
# What a browser fetches by itself, by element.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


def build(folder: Path, docs: Path = DOCS) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts/site"), str(folder), str(docs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for value in (given.get("id"),) if value}
        found = given.get(LOADED.get(tag, ""))
        if found and given.get("rel") not in {"canonical", "next", "prev", "search", "index"}:
            self.loaded.append(found)


# -- what is there -----------------------------------------------------------------------------------


def test_every_document_is_in_the_menu_once() -> None:
    assert sorted(PAGES) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_entry_of_the_menu_has_a_line_or_a_title_that_says_it() -> None:
    for section in navigation.sections():
        for entry in section.entries:
            assert entry.about, f"{entry.page} has no line in docs/index.md"


@pytest.mark.timeout(330)
def test_every_page_is_built_and_in_the_menu(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in PAGES[1:]:
        html = page.removesuffix(".md") + ".html"
        assert (site / html).is_file()
        assert f'href="{html}"' in start


def test_headings_have_the_anchors_that_github_gives_them(site: Path) -> None:
    """So what `make check` says of a link holds on both."""
    for page in PAGES:
        ids = Elements((site / page).with_suffix(".html").read_text()).ids
        assert links.anchors(DOCS / page) <= ids, page


def test_llms_txt_lists_every_page_with_a_link_that_works(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    listed = re.findall(r"^- \[.+\]\((.+\.md)\)", text, re.MULTILINE)
    assert listed == PAGES[1:]
    for page in listed:
        assert (site / page).read_text() == (DOCS / page).read_text()


# -- what it asks of the reader ----------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        foreign = [one for one in Elements(page.read_text()).loaded if re.match(r"(https?:)?//", one)]
        assert not foreign, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", sheet.read_text()), sheet


@pytest.mark.timeout(330)
def test_it_can_be_searched_without_a_server(site: Path, tmp_path: Path) -> None:
    shown = _in_browser(f"{(site / 'search.html').as_uri()}?q=visibility_timeout", tmp_path)
    results = shown.partition('id="search-results"')[2]
    assert 'href="celery.html"' in results


@pytest.mark.timeout(330)
def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    """Wide tables, code and pictures scroll by themselves; nothing else reaches over the edge."""
    frames = [f'<iframe src="{(site / page).with_suffix(".html").as_uri()}"></iframe>' for page in PAGES]
    measure = tmp_path / "measure.html"
    measure.write_text(
        f"<style>iframe {{ width: {PHONE_PX}px; height: 800px }}</style>{''.join(frames)}<p></p>"
        f"<script>onload = () => document.querySelector('p').textContent = {WIDTHS}</script>"
    )
    shown = _in_browser(measure.as_uri(), tmp_path, "--allow-file-access-from-files")
    widths = [float(width) for width in re.findall(r"<p>([\d. ]+)</p>", shown)[0].split()]
    assert len(widths) == len(PAGES) and min(widths) > PHONE_PX / 2
    assert {page: width for page, width in zip(PAGES, widths, strict=True) if width > PHONE_PX} == {}


def _in_browser(address: str, home: Path, *flags: str) -> str:
    assert shutil.which("chromium"), "chromium is not installed: scripts/setup browser"
    show = ("--dump-dom", "--virtual-time-budget=20000", f"--user-data-dir={home / 'browser'}")
    command = ["chromium", *FLAGS, *show, *flags, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


# -- what fails the build ----------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A project of two pages, with the configuration of this one."""
    for name in ("docs/conf.py", "scripts/navigation.py", "src/umbel/version.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(DOCS / "_static", tmp_path / "docs/_static")
    (tmp_path / "docs/index.md").write_text("# Start\n\n## Guide\n\n- [Other](other.md): the other page\n")
    return tmp_path


@pytest.mark.timeout(330)
def test_a_dead_link_fails_the_build(small: Path) -> None:
    dead = ("[gone](gone.md)", "[gone](other.md#nowhere)", "[gone](#nowhere)")
    (small / "docs/other.md").write_text("# Other\n\n[fine](index.md#guide)\n\n" + "\n\n".join(dead) + "\n")
    done = build(small / "site", small / "docs")
    assert done.returncode != 0
    assert sorted(re.findall(r"other\.md:(\d+): WARNING", done.stderr)) == ["5", "7", "9"], done.stderr
