"""A Celery task that is interrupted has not failed, and does not ask to be retried (F8)."""

from typing import Any

import pytest
from celery.exceptions import Retry
from celery.states import FAILURE, RETRY

from umbel.celery.host import _Info, _Interrupted
from umbel.errors import TaskCancelled, WorkerStopping


def raised_by(interruption: Exception) -> Exception:
    """What a lock raises that was left half-taken."""
    error = RuntimeError("release unlocked lock")
    error.__context__ = interruption
    return error


@pytest.mark.parametrize("interruption", [TaskCancelled("cancelled"), WorkerStopping("stops")])
@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (FAILURE, lambda interruption: interruption),
        (FAILURE, raised_by),
        (RETRY, lambda interruption: Retry(exc=interruption)),  # as `autoretry_for=(Exception,)` does
        (RETRY, lambda interruption: Retry(exc=raised_by(interruption))),
    ],
)
def test_an_interruption_passes_through_celerys_tracer(
    state: str, shown: Any, interruption: Exception
) -> None:
    with pytest.raises(_Interrupted) as told:
        _Info(state, shown(interruption)).handle_error_state(None, None)
    assert told.value.error is interruption
