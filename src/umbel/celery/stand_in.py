"""Stand-ins: what handlers of Celery's signals get where Celery would give its worker or its request."""

from typing import Any, NoReturn

from umbel.pools.guard import Raised, call_guarded
from umbel.wire.call import read_header_map
from umbel.wire.message import Message
from umbel.wire.properties import delivery_info_of, properties_of


class WorkerStandIn:
    """The sender of `worker_init`, `worker_ready` and the like: it knows its app and its name."""

    def __init__(self, app: Any, hostname: str) -> None:
        self.app = app
        self.hostname = hostname
        self.pool_cls = "prefork"  # what Django's fix-up asks: whether there are children that inherit

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a signal handler uses {name!r} of Celery's worker object, which `umbel worker` does not have; "
            "only app and hostname are available"
        )

    def __repr__(self) -> str:
        return f"<umbel worker {self.hostname}>"


class RequestStandIn:
    """The `request` of `task_received`: Celery's, as far as it is about the message."""

    def __init__(self, app: Any, context: Any, message: Message) -> None:
        self.app = app
        self.message = MessageStandIn(message, "")
        self.name = self.task_name = context.shadow or context.task
        self.type = context.task
        self.task = app.tasks[context.task]
        self.request_dict = vars(context)
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, _NAMES.get(name, name))

    def __repr__(self) -> str:
        return f"<Request: {self.name}[{self._context.id}]>"


class MessageStandIn:
    """A message as handlers know it from kombu: to look at, not to acknowledge."""

    def __init__(self, message: Message, queue: str) -> None:
        headers = call_guarded(read_header_map, message.headers)
        self.headers: dict[str, Any] = {} if isinstance(headers, Raised) else headers.value
        self.body = message.body
        self.content_type, self.content_encoding = message.content_type, message.content_encoding
        self.properties = properties_of(message)
        self.delivery_info = delivery_info_of(message, queue, redelivered=False)


_NAMES = {"task_id": "id"}
