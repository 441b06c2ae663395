"""An app with the ways of another worker: its task rules, its hooks, a scheduler of its own.

`launch` has no settings for these; they are set where it reads them from the app. Tasks write to the file
that FOREIGN_JOURNAL names, a line each: what happened, and of what.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from threading import Event
from typing import Any

from msgspec.structs import replace

from umbel import App
from umbel.launch.project import NativeProject
from umbel.protocol.delivery.delivery import TaskRules
from umbel.worker.foreign_scheduler import SchedulerTerm
from umbel.worker.user_code import NoticeHooks

EVERY_S = 0.25
app = App("foreign_tasks")


def note(*words: object) -> None:
    with open(os.environ["FOREIGN_JOURNAL"], "ab", buffering=0) as journal:  # one write is one line
        journal.write(" ".join(map(str, words)).encode() + b"\n")


@app.task(ignore_result=True)
def slot(number: int) -> None:
    note("slot", number)


def dies(name: str) -> None:
    note("ran", name)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(name: str) -> None:
    note("ran", name)
    Event().wait(60)


def fails(name: str) -> None:
    note("ran", name)
    raise KeyError(name)


NO_ACKS = TaskRules(redelivers_lost=False, rejects_failed=True, redelivers_timed_out=True)
RULES: Mapping[str, TaskRules] = {
    "early.dies": TaskRules(acks_taken=True),
    "late.dies": TaskRules(redelivers_lost=False),
    "lost.dies": TaskRules(),
    "no_acks.dies": NO_ACKS,
    "no_acks.fails": NO_ACKS,
    "no_acks.hangs": NO_ACKS,
}
for _name in RULES:
    app.task(globals()[_name.partition(".")[2]], name=_name)


class Slots:
    """Sends each slot of EVERY_S once; the state is the last one that was sent."""

    def __init__(self, leadership: SchedulerTerm) -> None:
        self._leadership = leadership

    def start(self) -> None:
        self._last = json.loads(self._leadership.load_state() or b"0") or int(time.time() / EVERY_S)
        note("leads", os.getpid())

    def tick(self) -> float:
        number = int(time.time() / EVERY_S)
        for due in range(self._last + 1, number + 1):
            sent = app.prepare(slot.name, (due,), {}, {}).outgoing
            if not self._leadership.publish([sent], json.dumps(due).encode()):
                return 1.0
            self._last = due
        return EVERY_S

    def close(self, lost: bool) -> None:
        note("closed", lost)


def told(what: str, **about: Any) -> None:
    shown = {name: value for name, value in about.items() if isinstance(value, bool | str)}
    note("told", what, json.dumps(shown), type(about.get("error")).__name__)


NOTICES = NoticeHooks(
    **{name: partial(told, name) for name in ("stopping", "heartbeat", "received", "unknown", "failed")}
)
_rules_of, _written = NativeProject.task_rules, NativeProject.written_by_users
_hooks = NativeProject.life_hooks


def _with_rules(*args: Any) -> dict[str, TaskRules]:
    return {**_rules_of(*args), **RULES}


def _with_ways(*args: Any) -> dict[str, Any]:
    wanted = os.environ.get("FOREIGN_WAYS", "").split(",")
    ways: dict[str, Any] = {"scheduler": Slots} if "scheduler" in wanted else {}
    return {**_written(*args), **ways, **({"notices": NOTICES} if "notices" in wanted else {})}


def _with_hooks(*args: Any) -> Any:
    return replace(_hooks(*args), init=partial(note, "begins"), shutdown=partial(note, "shut down"))


for _place, _mine in (
    ("task_rules", _with_rules),
    ("written_by_users", _with_ways),
    ("life_hooks", _with_hooks),
):
    setattr(NativeProject, _place, _mine)
