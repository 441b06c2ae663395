from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outbox.places import Place
from tests.servers.postgres import shared_postgres
from umbel import App


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database with an empty outbox."""
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else shared_postgres().new_database()
    made = Place(url)
    made.create()
    return made


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App("shop", broker=f"sqlite:///{tmp_path}/umbel.db")

    @made.task(name="shop.pay")
    def pay(order: int) -> int:
        return order

    yield made
    made.close()
