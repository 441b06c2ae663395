"""How Sphinx makes the site from these pages (`make site`); docs/decisions/0020 says why it is Sphinx."""

import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import navigation  # noqa: E402 (a plain file beside this one, not an installed package)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = (ROOT / "src/umbel/version.py").read_text(encoding="utf-8").split('"')[-2]

project = "Umbel"
author = PROJECT["authors"][0]["name"]
copyright = f"2026, {author}"
version = release = VERSION

extensions = ["myst_parser"]
exclude_patterns = ["_static"]
myst_heading_anchors = 4  # the anchors that GitHub makes of headings
myst_links_external_new_tab = False
suppress_warnings: list[str] = []
nitpicky = True

html_theme = "furo"
html_title = f"Umbel {VERSION}"
html_static_path = ["_static"]
html_css_files = ["umbel.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": PROJECT["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def add_menu(_app: Any, docname: str, source: list[str]) -> None:
    """A page that lists others gets a hidden table of contents of the same pages."""
    if PurePosixPath(docname).name == "index":
        folder = PurePosixPath(docname).parent
        for section in navigation.sections_of(source[0], f"{docname}.md"):
            pages = "\n".join(
                f"{entry.title} <{PurePosixPath(entry.page).relative_to(folder).with_suffix('')}>"
                for entry in section.entries
            )
            caption = f":caption: {section.title}\n" if section.title else ""
            source[0] += f"\n```{{toctree}}\n:hidden:\n{caption}\n{pages}\n```\n"


def write_llms_txt(app: Any, error: Exception | None) -> None:
    """llms.txt, and the Markdown it leads to: the pages as they were written."""
    if error is None:
        output = Path(app.outdir)
        (output / "llms.txt").write_text(llms_txt(), encoding="utf-8")
        for page in ["index.md", *(page for section in navigation.sections() for page in section.pages)]:
            (output / page).write_bytes((ROOT / "docs" / page).read_bytes())


def llms_txt() -> str:
    lines = ["# Umbel", "", f"> {PROJECT['description']}", ""]
    for section in navigation.sections():
        lines += [f"## {section.title}", ""]
        for entry in (one for top in section.entries for one in top.walk()):
            lines.append(f"- [{entry.title}]({entry.page})" + (f": {entry.about}" if entry.about else ""))
        lines.append("")
    return "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_menu)
    app.connect("build-finished", write_llms_txt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
