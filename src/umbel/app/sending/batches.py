"""Batches: many calls as messages that are sent together, and the results of the calls."""

from collections.abc import Iterable
from typing import Any

from umbel.app.canvas.signature import Signature
from umbel.app.results import AsyncResult
from umbel.app.running.request import CURRENT_REQUEST
from umbel.app.sending.prepare import Prepared, new_ids


def prepare_many(signatures: Iterable[Signature[Any]]) -> tuple[list[Prepared], list[AsyncResult[Any]]]:
    calls, sender = list(signatures), CURRENT_REQUEST.get()
    prepared: list[Prepared] = []
    results: list[AsyncResult[Any]] = []
    for call, task_id in zip(calls, new_ids(len(calls)), strict=True):
        if type(call) is Signature:  # one message, and no copy of the call is needed to make it
            one = call.prepare_as(task_id, sender=sender)
            prepared.append(one)
            ignored = one.ignores_result
            results.append(AsyncResult(one.task_id, app=call.app, ignored=ignored, types=one.types))
        else:
            copy = call.clone()
            copy.freeze()
            prepared += copy.prepare(sender=sender)
            results.append(copy.handle())
    return prepared, results
