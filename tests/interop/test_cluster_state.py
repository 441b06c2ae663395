"""Our cluster state beside Celery's own, which sits behind its monitors and Flower (L4, L7).

Told in order they agree on everything that both show, apart from the deviations that are meant.
Told in other orders Celery's has several answers where ours has one.
"""

import json
import os
import random
import subprocess
from collections import Counter, defaultdict
from itertools import permutations
from pathlib import Path
from typing import Any

from tests.events.histories import ORDER_DEPENDENT_IN_CELERY, Wire, event
from tests.interop.mixed_cluster import program_of
from umbel.events.state import ClusterState

SCRIPT = Path(__file__).with_name("celery_state.py")
HISTORIES = 20_000 if os.environ.get("UMBEL_SOAK") else 2_000
SHOWN = ("state", "name", "args", "result", "worker")


def ask_celery(histories: list[list[Wire]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [program_of("celery", "python"), SCRIPT],
        input="".join(json.dumps(history) + "\n" for history in histories),
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def ask_umbel(history: list[Wire]) -> dict[str, Any]:
    state = ClusterState()
    state.apply(history)
    record = state.task("t1")
    assert record is not None
    return {name: getattr(record, name) for name in SHOWN}


def tell_a_story(chance: random.Random) -> list[Wire]:
    """One task as workers of one kind tell it, in order, up to some point."""
    says_attempts, sends_first = chance.random() < 0.5, chance.random() < 0.5
    told: list[Wire] = []

    def tell(kind: str, attempt: int, **fields: Any) -> None:
        if says_attempts or kind in ("sent", "received"):
            fields["retries"] = attempt
        clock = len(told) + 1
        told.append(event(kind, clock=clock, timestamp=float(clock), **fields))

    def send(attempt: int) -> None:
        if chance.random() < 0.7:
            tell("sent", attempt, hostname="gen1@z", name="app.add", args=f"({attempt},)")

    attempts = chance.randint(1, 4)
    send(0)
    for attempt in range(attempts):
        on = chance.choice(["u1@a", "u2@b"])
        tell("received", attempt, hostname=on, name="app.add", args=f"({attempt},)")
        if chance.random() < 0.9:
            tell("started", attempt, hostname=on)
        if chance.random() < 0.2:
            tell("progress", attempt, hostname=on)
        if attempt + 1 == attempts:
            ending = chance.choice(["succeeded", "failed", "revoked", "rejected"])
            tell(ending, attempt, hostname=on, **({"result": "7"} if ending == "succeeded" else {}))
            break
        if sends_first:
            send(attempt + 1)  # as Celery's workers do it
        tell("retried", attempt, hostname=on)
        if not sends_first:
            send(attempt + 1)
    return told[: chance.randint(1, len(told))]


def deviation(history: list[Wire]) -> str:
    """Which of the deviations that are meant this history ends in."""
    kinds = [one["type"].removeprefix("task-") for one in history]
    if kinds[-2:] == ["retried", "sent"]:
        return "RETRY outranks the sending it causes"
    if kinds[-1] == "sent" and len(kinds) > 1:
        return "sending the next attempt ends the one before"
    if kinds[-1] == "revoked" and "progress" in kinds:
        return "no state of a user's making outlives an ending"
    return ""


def test_told_in_order_both_know_the_same() -> None:
    chance = random.Random(4)
    histories = [tell_a_story(chance) for _ in range(HISTORIES)]
    deviations: Counter[str] = Counter()
    for history, theirs in zip(histories, ask_celery(histories), strict=True):
        ours = ask_umbel(history)
        if (why := deviation(history)) and ours != {name: theirs[name] for name in SHOWN}:
            deviations[why] += 1
        else:
            assert ours == {name: theirs[name] for name in SHOWN}, history
    assert set(deviations) == {
        "RETRY outranks the sending it causes",
        "sending the next attempt ends the one before",
        "no state of a user's making outlives an ending",
    }


def test_where_celery_has_several_answers_we_have_one() -> None:
    orders = [
        (name, list(order))
        for name, (history, _) in ORDER_DEPENDENT_IN_CELERY.items()
        for order in permutations(history)
    ]
    theirs, ours = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for (name, order), answer in zip(orders, ask_celery([order for _, order in orders]), strict=True):
        theirs[name].add(json.dumps(answer, sort_keys=True))
        ours[name].add(json.dumps(ask_umbel(order), sort_keys=True))
    assert all(len(answers) > 1 for answers in theirs.values())
    assert all(len(answers) == 1 for answers in ours.values())
