from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel import App


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """An app of its own for each test; its file is made only by tests that leave eager mode."""
    made = App("tests", broker=f"sqlite:///{tmp_path}/umbel.db")
    yield made
    made.close()
