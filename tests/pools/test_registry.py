import pytest

from tests.pools.recorder import settings
from umbel.errors import BadSetting
from umbel.pools import make_pool
from umbel.pools.abilities import ABILITIES


def test_an_unknown_pool_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(BadSetting, match="did you mean 'prefork'"):
        make_pool("preforked", settings())


@pytest.mark.parametrize("name", ABILITIES)
def test_every_pool_is_in_the_table_of_abilities(name: str) -> None:
    """F10."""
    pool = make_pool(name, settings())
    assert pool.abilities is ABILITIES[name]
    assert pool.describe()["implementation"] == name
