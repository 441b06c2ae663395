"""Commands that only inspect a worker: whether it answers, what it knows, what it does."""

from typing import Any

from umbel.control.panel import Panel
from umbel.control.state import InspectionSection, LimitsSection, NodeSection
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.rate import show_rate

panel = Panel()

BUILTIN_PREFIX = "celery."
DEFAULT_ITEMS = ("exchange", "routing_key", "rate_limit")


@panel.inspect_command(stateless=True)
def ping(_state: NodeSection, **_: Any) -> dict[str, str]:
    """Ask whether a worker is there."""
    return {"ok": "pong"}


@panel.inspect_command
def clock(state: NodeSection, **_: Any) -> dict[str, int]:
    """The logical clock."""
    return {"clock": state.clock.value}


@panel.inspect_command
def stats(state: InspectionSection, **_: Any) -> dict[str, Any]:
    """Counters, pool, broker and resources."""
    return state.stats()


@panel.inspect_command
def health(state: InspectionSection, **_: Any) -> dict[str, Any]:
    """Whether it is well, and what it has done."""
    return state.health()


@panel.inspect_command(alias="dump_conf", args=[("with_defaults", bool)], signature="[with_defaults]")
def conf(state: InspectionSection, with_defaults: bool = False, **_: Any) -> dict[str, Any]:
    """The settings of its app, passwords masked."""
    return state.conf(with_defaults=with_defaults)


@panel.inspect_command
def report(state: InspectionSection) -> dict[str, str]:
    """Versions and settings, for a bug report."""
    return {"ok": state.report()}


@panel.inspect_command(alias="dump_tasks", variadic="taskinfoitems", signature="[ATTRIBUTE ...]")
def registered(
    state: LimitsSection, taskinfoitems: list[Any] | None = None, builtins: bool = False, **_: Any
) -> list[str]:
    """The tasks that can run there."""
    items = [str(item) for item in taskinfoitems or DEFAULT_ITEMS]
    return [
        _described(name, rules, items)
        for name, rules in sorted(state.task_rules.items())
        if builtins or not name.startswith(BUILTIN_PREFIX)
    ]


def _described(name: str, rules: TaskRules, items: list[str]) -> str:
    attributes = {
        "name": name,
        "rate_limit": show_rate(rules.rate_per_second) if rules.rate_per_second else None,
        "time_limit": rules.hard_limit_s,
        "soft_time_limit": rules.soft_limit_s,
        "acks_late": not rules.acks_before,
    }
    shown = [f"{item}={attributes[item]}" for item in items if attributes.get(item) is not None]
    return f"{name} [{' '.join(shown)}]" if shown else name
