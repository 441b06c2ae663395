import json
from pathlib import Path

import pytest

from tests.cli.running import Umbel
from umbel import App
from umbel.cli import exits, queues
from umbel.control.queue_pauses import PauseOutcome

TASKS = """
from umbel import App
app = App("shop", broker="sqlite:///{home}/queue.db")

@app.task(name="shop.pay", sensitive=["card"])
def pay(card, amount): ...
"""


def test_peeking_shows_no_sensitive_arguments_whoever_sent_them(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "peeked_shop.py").write_text(TASKS.format(home=tmp_path))
    with App(
        "client", broker=f"sqlite:///{tmp_path}/queue.db"
    ) as client:  # as Celery's: it knows no `sensitive`
        client.send_task("shop.pay", ["4111", 5])
        client.send_task("shop.other", ["shown"])
    for where in (["-A", "peeked_shop"], ["-A", "peeked_shop", "-b", f"sqlite:///{tmp_path}/queue.db"]):
        ran = umbel("queues", "peek", *where, "celery", "--json")
        assert ran.code == 0, ran.err
        shown = {one["task"]: one["args"] for one in json.loads(ran.out)}
        assert shown == {"shop.pay": "***", "shop.other": "('shown',)"}


def test_what_nodes_answer_is_told_in_one_line_each(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause(*_: object, **__: object) -> PauseOutcome:
        refused = {"a@\x1b[2J": "no\nceleryd: all is well"}
        return PauseOutcome(
            queue="q", paused=True, changed=True, told=("b\n@",), silent=("c\r@",), refused=refused
        )

    monkeypatch.setattr(queues, "pause_queue", pause)  # answers as no worker of ours gives them
    ran = umbel("queues", "pause", "-b", f"sqlite:///{tmp_path}/queue.db", "q")
    assert ran.code == exits.PARTIAL
    assert ran.err.splitlines() == [
        r"umbel: b\n@ was asked to stop consuming",
        r"umbel: c\r@ did not reply",
        r"umbel: a@\x1b[2J refused: no\nceleryd: all is well",
    ]
