"""No link is dead, and the check that says so notices one that is."""

from pathlib import Path

import pytest

from scripts import links

SITE = "https://example.org/shop"
PYPROJECT = f'[project]\nurls.Repository = "{SITE}"\n'


@pytest.mark.parametrize("page", links.pages(), ids=lambda page: str(page.relative_to(links.ROOT)))
def test_no_link_of_a_page_is_dead(page: Path) -> None:
    assert list(links.dead_links(page)) == []


def test_the_readme_links_as_pypi_needs_it() -> None:
    """PyPI shows it alone: there is no file beside it."""
    readme = (links.ROOT / "README.md").read_text()
    targets = [first or second for first, second in links.LINK.findall(readme)]
    assert targets and all(target.startswith("https://") for target in targets)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "docs").mkdir()
    (tmp_path / "src.py").touch()
    (tmp_path / "docs" / "other.md").write_text(
        "# Other\n\n## What's *in* `here`, exactly?\n\n## Twice\n\n## Twice\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "link",
    [
        "[gone](gone.md)",
        "[gone](other.md#nowhere)",
        "[gone](#nowhere)",
        "[gone](other.md#twice-2)",
        f"[gone]({SITE}/blob/main/gone.md)",
        f"[gone]({SITE}/blob/main/docs/other.md#nowhere)",
        "[gone][1]\n\n[1]: gone.md",
        "[not on the site](../src.py)",
        "![a picture](gone.png)",
    ],
)
def test_a_dead_link_is_found(project: Path, link: str) -> None:
    (project / "docs" / "page.md").write_text(f"# Page\n\nSee {link}.\n")
    ((line, _),) = links.dead_links(project / "docs" / "page.md", project)
    assert line >= 3


@pytest.mark.parametrize(
    "link",
    [
        "[there](other.md)",
        "[there](other.md#whats-in-here-exactly)",
        "[there](other.md#twice-1)",
        "[there](#page)",
        f"[there]({SITE}/blob/main/docs/other.md#other)",
        f"[there]({SITE}/issues)",
        "[elsewhere](https://example.net/gone.md#nowhere)",
        "`[code](gone.md)`",
        "\n```text\n[code](gone.md)\n```\n",
        "<!-- [hidden](gone.md) -->",
    ],
)
def test_a_good_link_is_left_alone(project: Path, link: str) -> None:
    (project / "docs" / "page.md").write_text(f"# Page\n\nSee {link}.\n")
    assert list(links.dead_links(project / "docs" / "page.md", project)) == []
