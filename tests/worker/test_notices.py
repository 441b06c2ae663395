"""What happens to messages is told, once each, in order, and off the loop; nothing where nobody asked."""

import asyncio
from threading import Event, current_thread
from time import time
from typing import Any

import pytest

from tests.waiting import DEADLINE_S
from tests.worker.recorded import QUEUE, Recorded, claimed_of, delivery_of, message_of
from umbel.errors import BadMessage
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import Admit, Refusal, TaskRules
from umbel.worker.user_code import NoticeHooks, Notices

LATE = Admit(TaskRules(hard_limit_s=2.5))


class Heard:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.threads: set[str] = set()
        made = {name: self._hook(name) for name in NoticeHooks.__struct_fields__}
        self.recorded = Recorded(notices=NoticeHooks(**made))

    def _hook(self, name: str) -> Any:
        def hook(**about: Any) -> None:
            self.threads.add(current_thread().name)
            self.told.append((name, about))

        return hook

    def all(self) -> list[tuple[str, dict[str, Any]]]:
        self.recorded.context.notices.wait_called(DEADLINE_S)
        return self.told


def test_how_messages_end_without_an_outcome_is_told_in_order() -> None:
    heard = Heard()
    recorded = heard.recorded
    ended, running, unreadable = claimed_of(None), claimed_of(LATE), delivery_of()
    running.terminated_by = "SIGTERM"
    recorded.endings.refuse(ended, Refusal.REVOKED)
    recorded.endings.refuse(ended, Refusal.EXPIRED)
    recorded.endings.settle(running, Outcome(1, "cancelled", 5.0, 0.5))
    recorded.endings.refuse(ended, Refusal.UNKNOWN)
    recorded.endings.bury_unreadable(unreadable, BadMessage("no JSON"))
    recorded.endings.lose(running, LostJob(1, True, "killed", timed_out=True, ran=True), stopping=False)
    recorded.endings.refuse(ended, Refusal.POISONOUS)
    of = {"message": ended.message, "queue": QUEUE}
    *told, (rejected, why), (failed, late), (failed_too, poisonous) = heard.all()
    assert told == [
        ("revoked", {**of, "terminated": False, "signal": "", "expired": False}),
        ("revoked", {**of, "terminated": False, "signal": "", "expired": True}),
        ("revoked", {**of, "terminated": True, "signal": "SIGTERM", "expired": False}),
        ("unknown", of),
    ]
    assert (rejected, why["message"], str(why["error"])) == ("rejected", unreadable.message, "no JSON")
    assert (failed, failed_too) == ("failed", "failed")
    assert [type(one["error"]).__name__ for one in (late, poisonous)] == ["TimeLimitExceeded", "WorkerLost"]
    assert heard.threads == {"umbel-hooks"}


def test_only_what_is_to_run_here_is_told_as_received() -> None:
    heard = Heard()
    recorded = heard.recorded
    admitted = asyncio.run(recorded.admission.admit([delivery_of(), delivery_of(message_of(task="no.such"))]))
    recorded.revoked.add("t", time() + 60)
    assert asyncio.run(recorded.admission.admit([delivery_of()])) == []
    (claimed,) = admitted
    assert [what for what, _ in heard.all()] == ["log_received", "received", "unknown", "revoked"]
    assert heard.told[0][1] == heard.told[1][1] == {"message": claimed.message, "queue": QUEUE}


def test_a_receipt_is_logged_before_the_task_can_run() -> None:
    heard = Heard()
    asyncio.run(heard.recorded.admission.admit([delivery_of()]))
    assert heard.told[0][0] == "log_received"
    assert current_thread().name in heard.threads


def test_where_nobody_asked_nothing_waits_and_no_thread_is_started() -> None:
    for notices in (Notices(), Notices(NoticeHooks())):
        notices.call("heartbeat")
        notices.call("stopping", signal="SIGTERM", how="warm")
        notices.wait_called(DEADLINE_S)
        assert not notices.wanted and notices._thread is None


def test_a_hook_that_hangs_is_waited_for_only_so_long() -> None:
    go_on, told = Event(), list[str]()

    def hang(*, signal: str, how: str) -> None:
        go_on.wait(DEADLINE_S)
        told.append(how)

    notices = Notices(NoticeHooks(stopping=hang))
    notices.call("stopping", signal="SIGTERM", how="warm")
    notices.wait_called(0.0)
    assert told == []
    go_on.set()
    notices.wait_called(DEADLINE_S)
    assert told == ["warm"]


@pytest.mark.parametrize("names", [["heartbeat"], ["stopping", "heartbeat"]])
def test_a_hook_that_raises_keeps_no_other_from_being_called(
    names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fail(**_: Any) -> None:
        raise KeyError("mine")

    notices = Notices(NoticeHooks(stopping=fail, heartbeat=lambda: told.append("beat")))
    for name in names:
        notices.call("stopping", signal="SIGTERM", how="warm") if name == "stopping" else notices.call(
            "heartbeat"
        )
    notices.wait_called(DEADLINE_S)
    assert told == ["beat"] and len(caplog.records) == len(names) - 1
