"""What a pool cannot do is said in one table, shown in the docs and refused at start (F10)."""

from pathlib import Path

from msgspec.structs import replace

from umbel.pools.abilities import ABILITIES, TITLES, Abilities, table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "pools.md"


def test_the_docs_show_the_table_of_abilities() -> None:
    text = DOCS.read_text(encoding="utf-8")
    shown = text.partition("<!-- abilities -->\n")[2].partition("<!-- /abilities -->")[0]
    assert shown.strip() == "\n".join(table()).strip()


def test_every_ability_has_a_title() -> None:
    assert list(Abilities.__struct_fields__) == list(TITLES)


def test_prefork_can_do_everything() -> None:
    """But it has no greenlets."""
    assert replace(ABILITIES["prefork"], gevent_children="") == Abilities()
