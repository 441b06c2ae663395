"""Ending: what becomes of a message whose run was lost, timed out or failed, by the rules of its task.

A message that is acknowledged before its task ends (`TaskRules.acks_before`) runs at most once: whatever
ends its run is a failure, and only one that has not run goes back. All others are redelivered after a
loss by default; a task may ask for a failure instead. Each redelivery that the run itself has caused
counts as a start, so that a message that kills its process, or never ends in time, is buried in the end.

A run that the stopping worker cuts off is not to blame: its message goes back and nothing is charged.
"""

from enum import Enum

from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.value import Value


class Loss(Value):
    """A run without an outcome.

    `started`: it was running when its process ended, and may be the cause. `ran`: it ran or may have
    run, at least in part. `timed_out`: its hard limit ended it.
    """

    ran: bool
    started: bool = False
    timed_out: bool = False


class Fate(Enum):
    GIVE_BACK = "give back"  # to its queue, and nothing is charged
    REDELIVER = "redeliver"  # to its queue, and a start is charged
    FAIL = "fail"  # the failure is stored, and the message is done
    REJECT = "reject"  # the same, and the message is a dead letter
    FAIL_AND_REDELIVER = "fail and redeliver"  # the failure is stored, and the message runs again
    BURY = "bury"  # it has had its last chance: the failure is stored, and it is a dead letter


def after_loss(rules: TaskRules, loss: Loss, *, last_chance: bool, stopping: bool) -> Fate:
    """`last_chance`: one more start that is charged would be too many."""
    if loss.timed_out:
        return _after_limit(rules, last_chance=last_chance)
    if not loss.ran:
        return Fate.GIVE_BACK
    if rules.acks_before:
        return Fate.FAIL
    if stopping:
        return Fate.GIVE_BACK
    if not rules.redelivers_lost:
        return after_failure(rules)
    return Fate.BURY if loss.started and last_chance else Fate.REDELIVER


def after_failure(rules: TaskRules) -> Fate:
    """The task raised, or its loss counts as a failure."""
    return Fate.REJECT if rules.rejects_failed and not rules.acks_before else Fate.FAIL


def _after_limit(rules: TaskRules, *, last_chance: bool) -> Fate:
    if rules.acks_before or not rules.redelivers_timed_out:
        return Fate.FAIL
    return Fate.BURY if last_chance else Fate.FAIL_AND_REDELIVER
