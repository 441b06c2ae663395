"""Finds dead links in the documents: `python -m scripts.links`, a part of `make check`.

A link leads to a file of the repository, to a heading of a page, or into this repository on its web site
(how the README links, because PyPI shows it without the files beside it). Headings have the anchors that
GitHub gives them; the site makes the same ones. Links to other sites are not tried: a check must not need
the network.
"""

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]^]+\]: +(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
OTHER_SITE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages(root: Path = ROOT) -> list[Path]:
    return [
        *sorted(root.glob("*.md")),
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / ".github").rglob("*.md")),
    ]


@cache
def repository(root: Path = ROOT) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def dead_links(page: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """The line and what is wrong with a link there."""
    text = _without(CODE, _without(COMMENT, _without(FENCE, page.read_text(encoding="utf-8"))))
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if problem := _problem(target, page, root):
            yield text.count("\n", 0, match.start()) + 1, f"{target}: {problem}"


def _problem(target: str, page: Path, root: Path) -> str:
    here = re.match(re.escape(repository(root)) + r"/(?:blob|tree)/main/(.*)", target)
    if here is None and OTHER_SITE.match(target):
        return ""
    place, _, anchor = (here[1] if here else target).partition("#")
    found = (root if here else page.parent) / place if place else page
    if not found.exists():
        return "no such file"
    if (
        here is None
        and "docs" in page.relative_to(root).parts
        and not found.resolve().is_relative_to(root / "docs")
    ):
        return f"not on the site; link to {repository(root)}/blob/main/… instead"
    if anchor and (found.suffix != ".md" or anchor not in anchors(found)):
        return "no such heading"
    return ""


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of its headings: lower case, no punctuation, dashes for spaces; -1, -2 for repeated ones."""
    text = _without(COMMENT, _without(FENCE, page.read_text(encoding="utf-8")))
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def _without(pattern: re.Pattern[str], text: str) -> str:
    """Blank it out, and keep the lines where they are."""
    return pattern.sub(lambda match: "\n" * match[0].count("\n"), text)


def main() -> int:
    dead = [f"{page.relative_to(ROOT)}:{line}: {what}" for page in pages() for line, what in dead_links(page)]
    print("\n".join(dead), end="\n" if dead else "", file=sys.stderr)
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
