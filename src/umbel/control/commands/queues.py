"""Commands about what a worker consumes."""

from typing import Any

from umbel.control.panel import Panel
from umbel.control.state import QueuesSection
from umbel.wire.limits import is_name

panel = Panel()

QUEUE_NAME_MAX = 200


@panel.inspect_command
async def active_queues(state: QueuesSection) -> list[dict[str, Any]]:
    """The queues that are consumed; of those that are paused, that they are."""
    paused = await state.paused_queues()
    return [queue_map(name) | ({"paused": True} if name in paused else {}) for name in state.queues]


@panel.control_command(
    args=[("queue", str), ("exchange", str), ("exchange_type", str), ("routing_key", str)],
    signature="QUEUE",
)
def add_consumer(
    state: QueuesSection,
    queue: str,
    exchange: str | None = None,
    exchange_type: str | None = None,
    routing_key: str | None = None,
    **_: Any,
) -> dict[str, str]:
    """Consume one more queue."""
    if problem := queue_name_problem(queue):
        return {"error": problem}
    if (exchange or queue, exchange_type or "direct", routing_key or queue) != (queue, "direct", queue):
        return {"error": "exchange and routing_key must equal the queue, and the exchange type direct"}
    state.add_queue(queue)
    return {"ok": f"add consumer {queue}"}


@panel.control_command(args=[("queue", str)], signature="QUEUE")
async def cancel_consumer(state: QueuesSection, queue: str, **_: Any) -> dict[str, str]:
    """Stop consuming a queue; what runs from it ends as ever."""
    await state.cancel_queue(queue)
    return {"ok": f"no longer consuming from {queue}"}


def queue_name_problem(queue: str) -> str:
    """Why this cannot be the name of a queue; "" if it can."""
    if 0 < len(queue) <= QUEUE_NAME_MAX and is_name(queue):
        return ""
    return f"a queue name must have 1 to {QUEUE_NAME_MAX} characters and no NUL"


def queue_map(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "exchange": {
            "name": name,
            "type": "direct",
            "arguments": None,
            "durable": True,
            "passive": False,
            "auto_delete": False,
            "delivery_mode": None,
            "no_declare": False,
        },
        "routing_key": name,
        "queue_arguments": None,
        "binding_arguments": None,
        "consumer_arguments": None,
        "durable": True,
        "exclusive": False,
        "auto_delete": False,
        "no_ack": False,
        "alias": None,
        "bindings": [],
        "no_declare": None,
        "expires": None,
        "message_ttl": None,
        "max_length": None,
        "max_length_bytes": None,
        "max_priority": None,
    }
