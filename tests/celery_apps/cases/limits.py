"""Limits of time and rate; acknowledgement when a child dies, a limit passes or a task fails."""

from typing import Any

from celery import chain, chord

from tests.celery_apps.asking import (
    case,
    ended,
    everywhere,
    got,
    journal,
    last_of_traceback,
    left,
    new_key,
    sorted_journal,
)
from tests.celery_apps.project import limited
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.tasks import add, catches_the_limit, dies, exits, interrupts, one, total, waits


@everywhere(quick=True)
def soft_limit_is_not_caught() -> Any:
    return ended(limited.softly.delay(new_key()))


@case(quick=True)
def soft_limit_is_caught() -> Any:
    key = new_key()
    result = catches_the_limit.apply_async((key,), soft_time_limit=1, time_limit=30)
    return [ended(result), journal(key, 1)]


@everywhere(quick=True)
def hard_limit() -> Any:
    key = new_key()
    return [ended(limited.hardly.delay(key)), journal(key, 1)]


@case()
def hard_limit_of_the_call() -> Any:
    return ended(waits.apply_async((new_key(),), time_limit=1))


@case()
def fraction_as_hard_limit() -> Any:
    return ended(waits.apply_async((new_key(),), time_limit=0.5))


@case()
def soft_limit_of_the_call() -> Any:
    result = waits.apply_async((new_key(),), soft_time_limit=1)
    return [ended(result), last_of_traceback(result)]


@case()
def limits_in_the_request() -> Any:
    return [
        got(limited.limits_of.apply_async(time_limit=20, soft_time_limit=10)),
        got(limited.limits_of.delay()),
    ]


@case()
def hard_limit_in_a_chain() -> Any:
    return got(chain(limited.hardly.si(new_key()), add.s(1)).delay())


@case()
def hard_limit_in_a_chord() -> Any:
    return ended(chord([limited.hardly.si(new_key()), one.s()], total.s()).delay())


@case()
def rate_limit_runs_all() -> Any:
    key = new_key()
    results = [limited.seldom.delay(key, number) for number in range(5)]
    return [[got(result) for result in results], sorted_journal(key, 5)]


# ---- a child that dies -----------------------------------------------------------------------------


def _runs(task: Any, how: str, lines: int, **options: Any) -> Any:
    key = new_key()
    result = task.apply_async((key, how), **options)
    end = ended(result)
    runs = journal(key, lines)
    return [end, runs, left(result)]


@case(alone=True)
def early_and_killed() -> Any:
    return _runs(limited.early, "die", 1)


@case(alone=True)
def early_and_lost_is_to_be_rejected() -> Any:
    return _runs(limited.early_lost, "die", 1)


@case(alone=True)
def late_and_killed() -> Any:
    return _runs(limited.late, "die", 1)


@case(alone=True)
def late_and_lost_is_rejected() -> Any:
    return _runs(limited.late_lost, "die", 2)


@case(alone=True)
def late_without_ack_and_killed() -> Any:
    return _runs(limited.late_no_ack, "die", 1)


@case(alone=True)
def late_without_ack_and_lost_is_rejected() -> Any:
    return _runs(limited.late_lost_no_ack, "die", 2)


@case(alone=True)
def early_and_left() -> Any:
    return _runs(limited.early, "exit", 1)


@case(alone=True)
def late_and_left() -> Any:
    return _runs(limited.late, "exit", 1)


@case()
def early_and_fails() -> Any:
    return _runs(limited.early, "fail", 1)


@case(quick=True)
def late_and_fails() -> Any:
    return _runs(limited.late, "fail", 1)


@case()
def late_without_ack_and_fails() -> Any:
    return _runs(limited.late_no_ack, "fail", 1)


@case()
def late_and_takes_too_long() -> Any:
    return _runs(limited.late, "wait", 1, time_limit=1)


@case()
def late_and_lost_and_takes_too_long() -> Any:
    return _runs(limited.late_lost, "wait", 1, time_limit=1)


@case()
def late_without_ack_and_takes_too_long() -> Any:
    """It runs again, and both ends are stored one after the other."""
    key = new_key()
    result = limited.late_no_ack.apply_async((key, "wait"), time_limit=1)
    ended(result)
    return journal(key, 2)


@case()
def early_and_takes_too_long() -> Any:
    return _runs(limited.early, "wait", 1, time_limit=1)


@case(alone=True)
def dies_in_a_chain() -> Any:
    key = new_key()
    return [got(chain(dies.si(key), add.s(1)).delay()), journal(key, 1)]


@case(alone=True)
def dies_in_a_chord() -> Any:
    return ended(chord([dies.si(new_key()), one.s()], total.s()).delay())


@case(alone=True, setups=("late",))
def dies_and_runs_again_by_setting() -> Any:
    key = new_key()
    return [got(chain(dies.si(key), add.s(1)).delay()), journal(key, 2)]


@case(alone=True)
def words_about_a_lost_process() -> Any:
    """All other cases leave these words out."""
    result = limited.early.delay(new_key(), "die")
    ended(result)
    return str(app.AsyncResult(result.id).result).split(" ")[:3]


@case(alone=True)
def exits_by_itself() -> Any:
    return ended(exits.delay())


@case(alone=True)
def interrupts_itself() -> Any:
    return ended(interrupts.delay())
