"""Which loop a worker gets: as the settings say, never another one silently."""

import pytest

from umbel.errors import BadSetting
from umbel.pools import event_loop
from umbel.pools.event_loop import loop_factory


def test_asyncio_is_asyncio_even_where_uvloop_is_installed() -> None:
    assert loop_factory("asyncio") is None


def test_without_uvloop_the_choice_is_asyncio_and_uvloop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "find_spec", lambda name: None)
    assert loop_factory("auto") is None
    with pytest.raises(BadSetting, match=r"pip install 'umbel\[uvloop\]'"):
        loop_factory("uvloop")
