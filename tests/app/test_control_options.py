"""Options of `app.control`: a misspelled name is refused before anything is sent or recorded."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from umbel import App
from umbel.app.cluster.control import Control
from umbel.brokers.interface import Broadcast

COMMANDS: dict[str, Callable[[Control], Any]] = {
    "shutdown": lambda control: control.shutdown(destnation=["w1@h"]),
    "terminate": lambda control: control.terminate("an-id", destinaton=["w1@h"]),
    "revoke": lambda control: control.revoke("an-id", nodes=["w1@h"]),
    "rate_limit": lambda control: control.rate_limit("t.add", "1/s", dest=["w1@h"]),
    "ping": lambda control: control.ping(node="w1@h"),
}


def _sent_to(sent: list[Broadcast]) -> Callable[..., None]:
    def broadcast(messages: Sequence[Broadcast], *, ttl_s: float) -> None:
        sent.extend(messages)

    return broadcast


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelled_option_sends_nothing_to_anybody(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, sent = App("t", broker=f"sqlite:///{tmp_path}/u.db"), list[Broadcast]()
    monkeypatch.setattr(app.producer, "broadcast", _sent_to(sent))
    monkeypatch.setattr(type(app.producer), "revoke", lambda *_: pytest.fail("a revoke was recorded"))
    try:
        with pytest.raises(TypeError, match=r"unexpected keyword argument .* known: destination, limit"):
            COMMANDS[command](app.control)
        assert sent == []
        app.control.shutdown(destination=["w1@h"])
        assert len(sent) == 1
    finally:
        app.close()
