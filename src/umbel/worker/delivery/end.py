"""Endings: what becomes of a message that has ended, was refused, or lost its process.

Each message that a worker has claimed ends in one of three ways. It is acknowledged, with what its task
stores and sends; it is buried among the dead letters, with a reason; or it is given back to its queue. A
message that was acknowledged before its task ended is gone from the broker: what it stores and sends is only
reported, and giving it back sends it again. docs/path-of-a-message.md draws all ways there.

The decisions are those of `protocol/delivery/delivery.py`. This module turns them into verdicts for the
settler, publishes task events, counts and logs. Nothing here waits.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import time
from traceback import format_exception, format_exception_only
from typing import Any, TypeVar

from msgspec.structs import replace

from umbel.backends.registry import sends_results
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, SetAside, Tag
from umbel.clock import cluster_now
from umbel.errors import (
    BadMessage,
    BrokerRefused,
    NotRegistered,
    PoolError,
    TaskError,
    TaskRevoked,
    TimeLimitExceeded,
    UmbelError,
    WireError,
    WorkerLost,
)
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import AdmissionPolicy, Fate, Loss, Refusal, after_failure, after_loss
from umbel.protocol.delivery.states import FAILURE, REVOKED
from umbel.protocol.delivery.trust import Doubted
from umbel.text import leaving
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.result import encode_failure, exception_map
from umbel.wire.show import cut
from umbel.wire.task import to_v2
from umbel.worker.context import Ending, WorkerContext
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents

log = logging.getLogger("umbel.worker.tasks")

REASON_MAX_CHARS = 4096
FAULT_LINES_MAX = 8  # the innermost frames of a traceback, and the error
REQUEUE_PAUSE_S = 1.0  # between runs of a task that requeues its message
_LOGGED_AT = {
    "success": logging.DEBUG,
    "failure": logging.ERROR,
    "retry": logging.INFO,
    "ignored": logging.DEBUG,
    "rejected": logging.WARNING,
    "requeued": logging.INFO,
}
_LOGGED_BY_CHILDREN = ("success", "failure", "retry", "ignored")  # where `children_log_endings`
_COUNTED_AS = {
    "success": "succeeded",
    "failure": "failed",
    "retry": "retried",
    "ignored": "ignored",
    "rejected": "rejected",
    "requeued": "requeued",
}
FAULT = "internal error while handling a message"
NOTHING = Ending()
ItemT = TypeVar("ItemT")
R = TypeVar("R")


class Endings:
    """Ends messages: a method for each event that can end one, each giving the settler its verdict."""

    def __init__(
        self, context: WorkerContext, policy: AdmissionPolicy, settler: Settler, events: TaskEvents
    ) -> None:
        settings = context.settings
        self._context = context
        self._counters = context.counters
        self._notices = context.notices
        self._policy = policy
        self._settler = settler
        self._events = events
        self._end_without_running = settings.end_without_running
        self._sends_results = sends_results(context.backend.url)
        self._logged_at = _LOGGED_AT | ({"success": logging.INFO} if settings.log_successes else {})
        self._logged_by_children = _LOGGED_BY_CHILDREN if settings.children_log_endings else ()

    # -- a message that is not opened ------------------------------------------------------------

    def bury_unreadable(self, delivery: Delivery, error: WireError) -> None:
        """Move a message that cannot be decoded, or is too large, to the dead letters."""
        kind = "corrupt message" if isinstance(error, BadMessage) else "message refused"
        about = self._bury_unopened(delivery, f"{kind}: {error}", is_verified=True)
        log.error("%s; moved to dead letters", kind, extra=about)
        self._notices.call("rejected", message=delivery.message, queue=delivery.queue, error=error)

    def bury_untrusted(self, delivery: Delivery, doubted: Doubted, *, is_verified: bool = False) -> None:
        """Move a message that fails the signature check to the dead letters; nothing in it is used.

        `is_verified`: it is only too old, and certainly did not run.
        """
        name = doubted.doubt.value
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        about = self._bury_unopened(delivery, doubted.reason, is_verified=is_verified)
        log.error("%s message refused by the signature check; moved to dead letters", name, extra=about)

    def note_set_aside(self, messages: Sequence[SetAside]) -> None:
        """Count and log the messages that the broker moved to the dead letters because of their size."""
        for message in messages:
            self._counters.buried += 1
            fields = {"queue": message.queue, "size_bytes": message.size_bytes}
            log.error("message refused: over message_max_bytes; moved to dead letters unread", extra=fields)

    def _bury_unopened(self, delivery: Delivery, why: str, *, is_verified: bool) -> dict[str, Any]:
        """Bury a message of which only the queue is known; return the fields to log."""
        reason = _reason(why)
        self._bury(delivery, delivery.message, reason, is_verified=is_verified)
        return {"queue": delivery.queue, "why": reason}

    # -- a message that is refused ---------------------------------------------------------------

    def refuse(self, claimed: Claimed, why: Refusal) -> None:
        """End a message that was refused: revoked, expired, of an unknown task, started too often."""
        if why in (Refusal.REVOKED, Refusal.EXPIRED):
            self._end_revoked(claimed, why.value, expired=why is Refusal.EXPIRED)
            log.info("task %s", why.value, extra=self._about(claimed))
        elif why is Refusal.UNKNOWN:
            self._fail(claimed, NotRegistered.named(claimed.headers.task), Fate.BURY)
            self._notify("unknown", claimed)
        else:
            text = f"the task started {claimed.arrival.starts} times, and its process died each time"
            self.bury(claimed, WorkerLost(text))

    def end_terminated(self, claimed: Claimed) -> None:
        """End the message of a running task that was terminated by a revoke."""
        self._end_revoked(claimed, "terminated", signal=claimed.terminated_by)
        log.warning("task terminated", extra=self._about(claimed, signal=claimed.terminated_by))

    def _end_revoked(self, claimed: Claimed, why: str, *, expired: bool = False, signal: str = "") -> None:
        self._counters.revoked += 1
        self._events.revoked(claimed, expired=expired, signal=signal)
        self._notify("revoked", claimed, terminated=bool(signal), signal=signal, expired=expired)
        self._release(claimed)
        self._acknowledge(claimed, self._without_running(claimed, TaskRevoked(why), REVOKED))

    def bury(self, claimed: Claimed, error: Exception) -> None:
        """Fail a task that cannot run here, and move its message to the dead letters."""
        self._fail(claimed, error, Fate.BURY)
        self._notify("failed", claimed, error=error)

    # -- a task that has ended in the pool -------------------------------------------------------

    def acknowledge_taken(self, claimed: Claimed) -> None:
        """Acknowledge a message with `acks_taken` when a child starts its task."""
        if claimed.run is not None and claimed.run.rules.acks_taken and not claimed.acked:
            claimed.acked = True
            self._settler.add(Ack(claimed.delivery.tag))

    def settle(self, claimed: Claimed, outcome: Outcome) -> None:
        """Settle the message of a task that ended in the pool, as its outcome and the task's rules say."""
        kind = outcome.kind
        if kind == "cancelled":
            self._settler.report((), outcome.follow_ups)  # what it sent before
            self.end_terminated(claimed)
            return
        if kind == "late":
            if claimed.sent_started:  # the pool announced a start that did not happen
                self._events.rejected(claimed, requeue=True)
            self.give_back(claimed, ran=False)
            return
        assert claimed.run is not None
        name = _COUNTED_AS[kind]
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        if self._events.noted:
            self._events.ended(claimed, outcome)
        if kind not in self._logged_by_children:
            self._log_outcome(claimed, outcome)
        if kind == "requeued":
            self._settler.report((), outcome.follow_ups)
            pause_s = 0.0 if self._context.shutdown.is_stopping else REQUEUE_PAUSE_S
            self.give_back(claimed, ran=True, not_before=cluster_now() + pause_s)
            return
        ending = self._ending_of(claimed, outcome)
        if kind == "rejected":
            self._bury_claimed(claimed, outcome.summary or "rejected by the task", ending)
        elif kind == "failure" and after_failure(claimed.run.rules) is Fate.REJECT:
            self._events.rejected(claimed, requeue=False)
            self._bury_claimed(claimed, outcome.summary, ending)
        else:
            self._acknowledge(claimed, ending, outcome.summary if kind == "failure" else None)
        if kind != "retry":
            self._release(claimed)

    def _log_outcome(self, claimed: Claimed, outcome: Outcome) -> None:
        level = logging.INFO if outcome.expected else self._logged_at[outcome.kind]
        if log.isEnabledFor(level):
            about = self._about(claimed, **_details(outcome))
            log.log(level, "task %s", _COUNTED_AS[outcome.kind], extra=about)

    # -- a task that ended without an outcome ----------------------------------------------------

    def lose(self, claimed: Claimed, lost: LostJob, *, stopping: bool) -> None:
        """Decide about a message whose process died or was killed: return, redeliver, fail or bury it."""
        assert claimed.run is not None
        self._counters.lost += lost.ran
        counts_start = lost.started and not claimed.run.count_start  # else it was counted before it ran
        error: UmbelError
        if lost.fault:  # any pool would fail the same way, so it is not retried
            self._counters.faults += 1
            fate = Fate.FAIL if claimed.acked else Fate.BURY
            error, counts_start = PoolError(lost.fault), False
        else:
            if lost.ran:
                self._events.delivered(claimed)
            loss = Loss(lost.ran, lost.started, lost.timed_out)
            last_chance = self._policy.is_poisonous_after(claimed.arrival)
            fate = after_loss(claimed.run.rules, loss, last_chance=last_chance, stopping=stopping)
            error = _error_of(claimed, lost, fate)
        if fate is Fate.GIVE_BACK:
            self.give_back(claimed, ran=lost.ran)
            return
        if fate is Fate.REDELIVER:
            about = self._about(claimed, why=lost.reason)
            log.warning("child process died; task will be redelivered", extra=about)
        else:
            self._fail(claimed, error, fate, counts_start=counts_start)
            self._notify("failed", claimed, error=error)
        if fate in (Fate.REJECT, Fate.FAIL_AND_REDELIVER):
            self._events.rejected(claimed, requeue=fate is Fate.FAIL_AND_REDELIVER)
        if fate in (Fate.REDELIVER, Fate.FAIL_AND_REDELIVER):
            verdict = Return(claimed.delivery.tag, counts_start, ran=lost.ran)
            self._settler.add(verdict, _sent_again(claimed, ran=lost.ran))

    def _fail(self, claimed: Claimed, error: Exception, fate: Fate, *, counts_start: bool = False) -> None:
        """Fail a task that has no outcome. `counts_start`: a message that is buried has one more start."""
        self._events.failed(claimed, error)
        if fate is Fate.BURY:
            log.error("task moved to dead letters", extra=self._about(claimed, why=_reason(str(error))))
        else:
            self._counters.failed += 1
            log.error("task failed", extra=self._about(claimed, why=str(error)))
        if fate is Fate.FAIL_AND_REDELIVER:
            ending = self._without_running(claimed, error, FAILURE, has_ended=False)
            self._settler.report(ending.results, ending.follow_ups, ending.after)
            return
        self._release(claimed)
        ending = self._without_running(claimed, error, FAILURE)
        if fate is Fate.FAIL:
            self._acknowledge(claimed, ending, str(error))
        else:
            self._bury_claimed(claimed, str(error), ending, charged=counts_start and fate is Fate.BURY)

    # -- an internal error -----------------------------------------------------------------------

    def bury_faulty_delivery(self, delivery: Delivery, error: BaseException) -> None:
        """Bury a message that met an internal error before it was opened."""
        self.note_fault(f"{FAULT}; moved to dead letters", delivery.message.correlation_id, error)
        self._bury(delivery, delivery.message, _fault_reason(error), is_verified=False)

    def bury_faulty(self, claimed: Claimed, error: BaseException, outcome: Outcome | None = None) -> None:
        """Bury a message that met an internal error: it must neither end the worker nor be redelivered.

        If its task has ended, the outcome is stored; if not, the task has failed.
        """
        text = FAULT if claimed.acked else f"{FAULT}; moved to dead letters"
        self.note_fault(text, claimed.headers.id, error)
        ending = NOTHING
        if outcome is not None:
            ending = self._ending_of(claimed, outcome)
        else:
            with suppress(Exception, SystemExit):  # of the app's code, which may be what is at fault
                ending = self._without_running(claimed, UmbelError(_fault_text(error)), FAILURE)
        self._release(claimed)
        if claimed.acked:
            self._settler.report(ending.results, ending.follow_ups, ending.after)
        else:
            self._bury(claimed.delivery, claimed.delivery.message, _fault_reason(error), ending)

    def note_fault(self, what: str, task_id: str, error: BaseException) -> None:
        """Count and log an internal error, with its traceback."""
        self._counters.faults += 1
        log.error(what, extra={"task_id": task_id}, exc_info=error)

    # -- the three ways to end -------------------------------------------------------------------

    def _acknowledge(self, claimed: Claimed, ending: Ending, failed: str | None = None) -> None:
        """Remove the message from the broker.

        `failed`: why its task failed; it may be retained for a retry.
        """
        keep = "" if failed is None else self._retained_as(claimed, failed)
        if claimed.acked:
            if keep:
                self._settler.retain_failed(Outgoing(claimed.delivery.queue, claimed.message), keep)
            self._settler.report(ending.results, ending.follow_ups, ending.after)
        else:
            ack = Ack(claimed.delivery.tag, ending.results, ending.follow_ups, ending.after, keep)
            self._settler.add_outcome(ack, claimed.delivery)

    def _retained_as(self, claimed: Claimed, why: str) -> str:
        """Return the reason stored with the message of a failed task; "" if the message is not retained."""
        if claimed.run is None or not claimed.run.rules.keeps_failed:
            return ""
        size = len(claimed.message.body) + len(claimed.message.headers)
        if size > (most := self._context.settings.failed_keep_max_bytes):
            text = "message of a failed task is too large to store; `umbel task retry` cannot retry it"
            log.warning(text, extra=self._about(claimed, size_bytes=size, most=most))
            return ""
        return self._vouched(claimed.delivery, _reason(why) or "failed")

    def _bury_claimed(self, claimed: Claimed, why: str, ending: Ending, *, charged: bool = False) -> None:
        """Move the message to the dead letters, unless it was acknowledged already."""
        if claimed.acked:
            self._settler.report(ending.results, ending.follow_ups, ending.after)
            return
        by_queue = claimed.run is not None and claimed.run.rules.rejects_by_queue
        self._bury(
            claimed.delivery, claimed.message, _reason(why), ending, charged=charged, by_queue=by_queue
        )

    def _bury(
        self,
        delivery: Delivery,
        message: Message,
        reason: str,
        ending: Ending = NOTHING,
        *,
        charged: bool = False,
        by_queue: bool = False,
        is_verified: bool = True,
    ) -> None:
        """Bury a message. `charged`: one more start counts. `is_verified`: the reason vouches for it."""
        self._counters.buried += 1
        stored = self._vouched(delivery, reason) if is_verified else reason
        results, follow_ups = ending.results, ending.follow_ups
        burial = Bury(delivery.tag, stored, charged, results, follow_ups, by_queue, ending.after)
        self._settler.add(burial, Outgoing(delivery.queue, message))

    def give_back(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> None:
        """Return the message to its queue.

        `ran`: its task may have run. `not_before`: when it may be claimed again.
        """
        message = _sent_again(claimed, ran=ran, not_before=not_before)
        if claimed.acked:  # the broker does not have it any more
            self._settler.resend(message)
            return
        counted = claimed.run is not None and claimed.run.count_start
        self._settler.add(Return(claimed.delivery.tag, -1 if counted else 0, ran, not_before), message)

    # -- what an ending consists of --------------------------------------------------------------

    def _ending_of(self, claimed: Claimed, outcome: Outcome) -> Ending:
        results = outcome.results
        if self._sends_results:
            results = self._addressed(claimed.message, results)
        return Ending(results, outcome.follow_ups, after=outcome.after)

    def _without_running(
        self, claimed: Claimed, error: Exception, status: str, *, has_ended: bool = True
    ) -> Ending:
        """Return what the app stores and sends for a task that has no outcome.

        `has_ended`: the caller adds the verdict that ends the message next.
        """
        tag = claimed.delivery.tag if has_ended and not claimed.acked else None
        signs_for = self._context.signs_for(claimed.delivery)
        return self._ask_app(claimed.message, claimed.delivery.queue, error, status, tag, signs_for)

    def _ask_app(
        self,
        message: Message,
        queue: str,
        error: Exception,
        status: str,
        tag: Tag | None,
        signs_for: str | None,
    ) -> Ending:
        """Ask the app what to store and send for a message whose task does not run to its end.

        Work that comes before it (`Ending.before`) goes to the settler; its results may join the verdict on
        `tag`, which is added next.
        """
        ending = self._end_without_running(message, queue, error, status, signs_for=signs_for)
        if (before := ending.before) is not None:
            self._settler.do_first(
                lambda: self._with_address(message, before()),
                attempts_max=ending.attempts_max,
                joins=tag if ending.joins else None,
            )
        return self._with_address(message, ending)

    def _with_address(self, message: Message, ending: Ending) -> Ending:
        return Ending(self._addressed(message, ending.results), ending.follow_ups, after=ending.after)

    def _addressed(self, message: Message, results: Sequence[StoredResult]) -> Sequence[StoredResult]:
        """Return results with the caller's address, where results are sent (rpc); none without an address."""
        if not self._sends_results:
            return results
        reply_to = message.reply_to
        return [replace(result, reply_to=reply_to) for result in results] if reply_to else ()

    def _release(self, claimed: Claimed) -> None:
        """Free the key of a unique task that has ended, so that it may be sent again."""
        key = claimed.headers.umbel_unique
        if isinstance(key, str):
            self._settler.release(key, claimed.headers.id)

    def _vouched(self, delivery: Delivery, reason: str) -> str:
        """Return the reason with this worker's signed statement that it verified the message, if it has keys.

        Only for a message that still has its signature: a message vouched for is signed again on request.
        """
        signer = None if self._context.broker.keyring is None else self._context.broker.signer
        if signer is None or delivery.unsigned:
            return reason
        return signer.vouched(reason, delivery.message, delivery.queue, cluster_now())

    def _about(self, claimed: Claimed, **fields: Any) -> dict[str, Any]:
        headers = claimed.headers
        return {"task": headers.task, "task_id": headers.id, "attempt": headers.retries, **fields}

    def _notify(self, notice: str, claimed: Claimed, **facts: Any) -> None:
        self._notices.call(notice, message=claimed.message, queue=claimed.delivery.queue, **facts)

    # -- results and follow-ups that are refused -------------------------------------------------

    def end_refused_parts(self, refused: Sequence[Refused]) -> None:
        """Count, log and fail results and messages that the broker or the result store refuses.

        The message that they belong to has ended. For callers that wait for them, the task has failed.
        """
        for refusal in refused:
            self._counters.refused += 1
            if isinstance(refusal.part, StoredResult):
                self._fail_refused_result(refusal.part, refusal.reason)
            else:
                self._fail_refused_message(refusal.part, refusal.reason)

    def _fail_refused_result(self, result: StoredResult, reason: str) -> None:
        fields = {"task_id": result.task_id, "state": result.status, "why": reason}
        if result.status == FAILURE:
            log.error("cannot store the failure of a task; callers that wait get no answer", extra=fields)
            return
        # A short failure may be accepted, and ends the wait for the result.
        log.error("cannot store the result of a task; storing a failure instead", extra=fields)
        error = BrokerRefused(f"the task ended as {result.status}, but its result cannot be stored: {reason}")
        failure = encode_failure(result.task_id, exception_map(error), None, done_at=time())
        self._settler.report([replace(failure, reply_to=result.reply_to)], ())

    def _fail_refused_message(self, sent: Outgoing, reason: str) -> None:
        """Fail the task of a refused message, which is among the dead letters."""
        error = BrokerRefused(f"the queue {sent.queue!r} refused the message: {reason}")
        fields = {"queue": sent.queue, "task_id": sent.message.correlation_id, "why": reason}
        log.error("broker refused a message; moved to dead letters", extra=fields)
        self._settler.release_of(sent.message)  # a retry holds the key of its task
        try:
            message = to_v2(sent.message)
            headers = read_headers(message)
        except WireError:
            return
        self._events.refused(headers, error)
        delivery = Delivery("", sent.queue, message, unsigned=self._is_unsigned(sent))
        signs_for = self._context.signs_for(delivery)
        ending = self._ask_app(message, sent.queue, error, FAILURE, None, signs_for)
        self._settler.report(ending.results, ending.follow_ups, ending.after)

    def _is_unsigned(self, sent: Outgoing) -> bool:
        """Check the signature itself: a message sent again has the headers that its sender wrote."""
        signer = None if self._context.broker.keyring is None else self._context.broker.signer
        if signer is None:
            return True
        message = replace(sent.message, exchange=sent.exchange, routing_key=sent.routing_key)
        return isinstance(signer.check_task(message, sent.queue)[0], Doubted)


def handle_each(
    handle: Callable[[ItemT], R], items: Iterable[ItemT], bury_faulty: Callable[[ItemT, BaseException], None]
) -> list[R]:
    """Handle each item; an internal error ends that item's message alone (N1)."""
    handled: list[R] = []
    for item in items:
        try:
            handled.append(handle(item))
        except (Exception, SystemExit) as error:  # of Umbel, or of the app, which ends messages
            bury_faulty(item, error)
    return handled


def _reason(text: str) -> str:
    """Cut the reason of a dead letter to a length that every broker stores and people read."""
    return cut(leaving(text), REASON_MAX_CHARS)


def _fault_text(error: BaseException) -> str:
    return f"internal error in the worker: {format_exception_only(error)[-1].strip()}"


def _fault_reason(error: BaseException) -> str:
    return _reason(f"{_fault_text(error)}\n{''.join(format_exception(error)[-FAULT_LINES_MAX:])}")


def _sent_again(claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> Outgoing:
    """Return the message to send if the broker no longer has it."""
    delivery = claimed.delivery
    return Outgoing(delivery.queue, claimed.message, not_before, ran or delivery.redelivered)


def _error_of(claimed: Claimed, lost: LostJob, fate: Fate) -> TaskError:
    """Return the error of a task that ended from outside: by a time limit, or with its process."""
    more = ""
    if fate is Fate.BURY:
        more = f"; started {claimed.arrival.starts + 1} times, 'task_max_deliveries' reached"
    if lost.timed_out:
        limit_s = claimed.hard_limit_s or 0.0
        return TimeLimitExceeded(f"the task exceeded its time limit of {limit_s:g} s{more}", limit_s=limit_s)
    return WorkerLost(f"{lost.reason} while running the task{more}")


def _details(outcome: Outcome) -> dict[str, Any]:
    """Return the log fields that describe an outcome."""
    match outcome.kind:
        case "success":
            return {"runtime_s": round(outcome.runtime_s, 3), "result": outcome.summary}
        case "retry":
            delay_s = max(0.0, outcome.not_before - cluster_now())
            return {"delay_s": round(delay_s, 1), "why": outcome.summary}
        case "failure" if outcome.traceback and not outcome.expected:
            return {"why": outcome.summary, "traceback": outcome.traceback}
        case _:
            return {"why": outcome.summary}
