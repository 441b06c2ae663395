from typing import Any

import pytest

from umbel.app.options import NAMES_MAX, Router
from umbel.errors import BadSetting


def test_without_routes_nothing_is_said() -> None:
    assert Router({}).route("shop.pack") == {}


def test_a_route_is_a_queue_or_options() -> None:
    router = Router({"a": "slow", "b": {"queue": "fast", "priority": 3}})
    assert router.route("a") == {"queue": "slow"}
    assert router.route("b") == {"queue": "fast", "priority": 3}
    assert router.route("c") == {}


def test_the_first_pattern_that_matches_wins_in_the_order_written() -> None:
    assert Router({"shop.*": "first", "shop.pack": "second"}).route("shop.pack") == {"queue": "first"}
    assert Router({"shop.pack": "second", "shop.*": "first"}).route("shop.pack") == {"queue": "second"}


def test_patterns_are_those_of_the_shell_and_mind_the_case() -> None:
    router = Router({"shop.[ab]?": "x", "*.slow": "y"})
    assert router.route("shop.a1") == {"queue": "x"}
    assert router.route("SHOP.a1") == {}
    assert router.route("anything.at.all.slow") == {"queue": "y"}


@pytest.mark.parametrize(
    "route", [{"que": "x"}, {"queue": "x", "ttl": 3}, {"priority": 10}, {"priority": "1"}, {"queue": 3}]
)
def test_a_route_that_cannot_be_is_refused_with_its_pattern(route: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=r"task_routes.*shop\.\*"):
        Router({"shop.*": route})


def test_names_seen_are_remembered_but_not_without_end() -> None:
    router = Router({"shop.*": "slow"})
    for number in range(NAMES_MAX + 10):
        router.route(f"shop.{number}")
    assert len(router._found) <= NAMES_MAX
    assert router.route("shop.0") == {"queue": "slow"}
