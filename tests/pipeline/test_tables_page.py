"""D2: every table is documented, column by column, as it is."""

from pathlib import Path

from tests.pipeline.tables_page import page

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


def test_the_page_of_tables_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.pipeline.tables_page > docs/tables.md"
