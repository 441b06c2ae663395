"""Commands that the shop's operators send to its workers."""

# mypy: disable-error-code="untyped-decorator"

from typing import Any

from celery.worker.control import control_command, inspect_command

LIMITS = {"discount": 10}


@inspect_command(alias="shop_limits")
def limits(state: Any, **_: Any) -> dict[str, Any]:
    """Show what the shop allows."""
    return {"node": state.hostname, "app": state.app.main, **LIMITS}


@control_command(args=[("percent", int)], signature="[PERCENT]")
def set_discount(state: Any, percent: int = 0, **_: Any) -> dict[str, int]:
    """Change the highest discount."""
    LIMITS["discount"] = percent
    return {"ok": percent}


@inspect_command()
def consumer_queues(state: Any, **_: Any) -> list[str]:
    """Looks into Celery's consumer."""
    return [queue.name for queue in state.consumer.task_consumer.queues]
