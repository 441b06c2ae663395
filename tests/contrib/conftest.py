from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel import App


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App("tests", broker=f"sqlite:///{tmp_path}/umbel.db")
    yield made
    made.close()
