"""What the dashboard does to whole queues: pause, resume, move; each as fields of an `ActionResult`."""

from typing import Any

from umbel.brokers.interface import Broker
from umbel.control.client import Asker
from umbel.control.queue_pauses import PauseOutcome, move_messages, pause_queue, resume_queue
from umbel.errors import UmbelError
from umbel.web.actions import MoveMessages, PauseQueue, ResumeQueue

ASK_S = 3.0
QueueAction = PauseQueue | ResumeQueue | MoveMessages


async def change_queue(broker: Broker, action: QueueAction) -> dict[str, Any]:
    try:
        match action:
            case PauseQueue(queue=queue):
                return _told(await pause_queue(broker, Asker(broker), queue, timeout_s=ASK_S))
            case ResumeQueue(queue=queue):
                return _told(await resume_queue(broker, Asker(broker), queue, timeout_s=ASK_S))
            case MoveMessages():
                moved = move_messages(broker, action.queue, action.target, limit=action.limit)
                return {"count": await moved}
    except UmbelError as error:
        return {"problem": str(error)}


def _told(outcome: PauseOutcome) -> dict[str, Any]:
    """One queue was changed; the replies are those of nodes that had to be told."""
    said = "no longer consuming" if outcome.paused else "consuming again"
    return {
        "count": 1,
        "replies": {node: {"ok": f"{said} {outcome.queue}"} for node in outcome.told},
        "silent": list(outcome.silent),
        "refused": dict(outcome.refused),
    }
