"""The plugin is the installed one, found by its entry point, and costs nothing where it is not used."""

import sys
from pathlib import Path
from typing import Any

import pytest
from shop.tasks import app

import umbel
from umbel.errors import AppNotFound
from umbel.testing.worker import app_under_test


def test_umbel_comes_from_the_wheel(pytestconfig: pytest.Config) -> None:
    assert Path(umbel.__file__).is_relative_to(sys.prefix)
    found: dict[str, Any] = {
        dist.metadata["name"]: plugin for plugin, dist in pytestconfig.pluginmanager.list_plugin_distinfo()
    }
    assert Path(found["umbel"].__file__).is_relative_to(sys.prefix)


def test_nothing_is_loaded_before_a_test_asks_for_it(loaded_at_start: list[str]) -> None:
    assert loaded_at_start == ["umbel", "umbel.testing", "umbel.testing.plugin", "umbel.version"]


def test_an_app_that_is_not_there_is_named_with_the_setting(pytestconfig: pytest.Config) -> None:
    assert app_under_test("shop.tasks:app", pytestconfig.rootpath) is app
    with pytest.raises(AppNotFound, match=r"umbel_app = shop\.task:app in pytest's settings: .*no module"):
        app_under_test("shop.task:app", pytestconfig.rootpath)
    assert app_under_test("", pytestconfig.rootpath) is not app
