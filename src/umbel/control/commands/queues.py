"""Commands about what a worker consumes."""

from typing import Any

from umbel.control.panel import Panel
from umbel.control.state import QueuesSection
from umbel.wire.limits import is_name

panel = Panel()

QUEUE_NAME_MAX = 200


@panel.inspect_command
def active_queues(state: QueuesSection) -> list[dict[str, Any]]:
    """The queues that are consumed."""
    return [queue_map(name) for name in state.queues]


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
    if not 0 < len(queue) <= QUEUE_NAME_MAX or not is_name(queue):
        return {"error": f"a queue has a name of 1 to {QUEUE_NAME_MAX} characters, and no NUL"}
    if (exchange or queue, exchange_type or "direct", routing_key or queue) != (queue, "direct", queue):
        return {"error": "a queue here is bound to the direct exchange of its own name, with its own name"}
    state.add_queue(queue)
    return {"ok": f"add consumer {queue}"}


@panel.control_command(args=[("queue", str)], signature="QUEUE")
async def cancel_consumer(state: QueuesSection, queue: str, **_: Any) -> dict[str, str]:
    """Stop consuming a queue; what runs from it ends as ever."""
    await state.cancel_queue(queue)
    return {"ok": f"no longer consuming from {queue}"}


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
