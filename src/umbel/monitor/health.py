"""Health: the state of the cluster in one sentence, in plain words."""

from collections.abc import Sequence

from umbel.monitor.shapes import Health, Level, Node

NAMED_MAX = 3
FAILING_SHARE = 0.5


def health_of(
    nodes: Sequence[Node], problem: str, *, waiting: int = 0, done: int = 0, failed: int = 0
) -> Health:
    """`done` and `failed` in the last minutes; `waiting` messages that are ready."""
    if problem:
        return Health("bad", f"The dashboard does not hear the cluster: {problem}")
    members = [one for one in nodes if one.state != "left"]
    if not members:
        return Health(*_nobody(waiting))
    silent = [one for one in members if one.state != "alive"]
    if silent:
        alive = len(members) - len(silent)
        level: Level = "bad" if not alive or any(one.state == "lost" for one in silent) else "warning"
        return Health(level, f"{alive} of {len(members)} workers answer; {_named(silent)}.")
    if done + failed >= 10 and failed > FAILING_SHARE * (done + failed):
        return Health(
            "warning", f"{_all(len(members))}, but {failed} of the last {done + failed} tasks failed."
        )
    return Health("ok", f"{_all(len(members))}.")


def _nobody(waiting: int) -> tuple[Level, str]:
    if waiting:
        return "bad", f"No worker is known, and {waiting:,} messages wait; start one with `umbel worker`."
    return "warning", "No worker is known; start one with `umbel worker`."


def _all(count: int) -> str:
    return "The only worker answers" if count == 1 else f"All {count} workers answer"


def _named(silent: Sequence[Node]) -> str:
    shown = [f"{one.node} silent for {one.silent_s:.0f} s, {one.state}" for one in silent[:NAMED_MAX]]
    more = len(silent) - NAMED_MAX
    return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)
