"""`python -m tests.celery_apps.ledger.client COUNT STEPS PARTS SECONDS`: sends, waits, says how all ended."""

import json
import os
import sys
import time
from collections import Counter
from threading import Event

from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError

from tests.celery_apps.ledger.celery import app, send

POLL = Event()


def main(count: int, steps: int, parts: int, seconds: float) -> None:
    print("sending", flush=True)
    left = send(count, steps, parts)
    print("sent", flush=True)
    deadline, ended = time.monotonic() + seconds, Counter[str]()
    while left and time.monotonic() < deadline:
        try:
            states = {one: app.AsyncResult(one).state for one in left}
        except (ConnectionError, OperationalError):  # Redis is away for a moment
            POLL.wait(0.5)
            continue
        left = [one for one, state in states.items() if state == "PENDING"]
        ended += Counter(state for state in states.values() if state != "PENDING")
        POLL.wait(0.2 if left else 0)
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    number, steps, parts, seconds = sys.argv[1:]
    main(int(number), int(steps), int(parts), float(seconds))
    os._exit(0)  # without the results that unsubscribe while the interpreter ends
