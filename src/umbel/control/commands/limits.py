"""Commands that change the limits of tasks while the worker runs."""

from typing import Any

from umbel.control.panel import Panel
from umbel.control.state import LimitsSection
from umbel.protocol.delivery.rate import parse_rate
from umbel.wire.limits import TIME_LIMIT_MAX_S

panel = Panel()


@panel.control_command(args=[("task_name", str), ("rate_limit", str)], signature="TASK RATE")
def rate_limit(state: LimitsSection, task_name: str, rate_limit: Any, **_: Any) -> dict[str, str]:
    """Let each worker start a task so often: 10/s, 100/m, 500/h; 0 takes the limit away."""
    rules = state.task_rules.get(task_name)
    try:
        per_second = parse_rate(rate_limit or 0)
    except ValueError as error:
        return {"error": f"Invalid rate limit string: {error}"}
    if rules is None:
        return {"error": "unknown task"}
    state.change_rules(task_name, rules.replaced(rate_per_second=per_second))
    if not per_second:
        return {"ok": "rate limit disabled successfully"}
    return {"ok": "new rate limit set successfully"}


@panel.control_command(
    args=[("task_name", str), ("soft", float), ("hard", float)], signature="TASK SOFT_S [HARD_S]"
)
def time_limit(
    state: LimitsSection, task_name: str, hard: float | None = None, soft: float | None = None, **_: Any
) -> dict[str, str]:
    """End a task after so many seconds; at the soft limit it is asked to end by itself."""
    rules = state.task_rules.get(task_name)
    if rules is None:
        return {"error": "unknown task"}
    for name, limit in (("soft", soft), ("hard", hard)):
        if limit and not 0 < limit <= TIME_LIMIT_MAX_S:
            return {"error": f"{name} must be a number of seconds above 0, at most ten years, not {limit!r}"}
    if reason := state.unenforceable(task_name, soft=bool(soft), hard=bool(hard)):
        return {"error": f"this worker's pool cannot enforce this limit: {reason}; start it with prefork"}
    state.change_rules(task_name, rules.replaced(soft_limit_s=soft or None, hard_limit_s=hard or None))
    return {"ok": "time limits set successfully"}
