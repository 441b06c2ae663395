"""States: the names under which a task's progress is stored and shown.

They are Celery's, so that each side reads what the other wrote. A task may invent more; any
name that is not ready counts as still under way.
"""

PENDING = "PENDING"  # nothing is known of the task; never written
RECEIVED = "RECEIVED"  # seen in events only
STARTED = "STARTED"
RETRY = "RETRY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"
REVOKED = "REVOKED"

READY_STATES = frozenset({SUCCESS, FAILURE, REVOKED})
"""States that a task does not leave: whoever waits for it may stop waiting."""
