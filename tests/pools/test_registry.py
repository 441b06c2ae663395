import pytest

from tests.pools.recorder import settings
from umbel.errors import BadSetting
from umbel.pools.registry import make_pool


def test_an_unknown_pool_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(BadSetting, match="did you mean 'prefork'"):
        make_pool("preforked", settings())


def test_a_pool_says_whether_it_can_end_a_job_in_time() -> None:
    assert make_pool("prefork", settings()).supports_time_limits
    assert not make_pool("solo", settings()).supports_time_limits
