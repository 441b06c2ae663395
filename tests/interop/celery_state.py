"""Celery's own cluster state, asked by a test: a history on each line, what it makes of it back.

Run with Celery's Python. A history is a list of events of the task `t1`, in the order of arrival.
"""

import json
import sys

from celery.events.state import State

for line in sys.stdin:
    state = State()
    for event in json.loads(line):
        state.event({**event, "local_received": event["timestamp"]})
    task = state.tasks["t1"]
    known = {name: getattr(task, name) for name in ("state", "name", "args", "result", "timestamp", "clock")}
    print(json.dumps({**known, "worker": task.worker and task.worker.hostname}), flush=True)
