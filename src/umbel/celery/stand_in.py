"""Stand-ins: what handlers of Celery's signals get where Celery would give its worker or its request."""

from typing import Any, NoReturn

from umbel.wire.message import Message


class WorkerStandIn:
    """The sender of `worker_init`, `worker_ready` and the like: it knows its app and its name."""

    def __init__(self, app: Any, hostname: str) -> None:
        self.app = app
        self.hostname = hostname
        self.pool_cls = "prefork"  # what Django's fix-up asks: whether there are children that inherit

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a signal handler asks for {name!r} of Celery's worker object, which `umbel worker` has not; "
            "there are app and hostname"
        )

    def __repr__(self) -> str:
        return f"<umbel worker {self.hostname}>"


class RequestStandIn:
    """The `request` of `task_received`: Celery's, as far as it is about the message."""

    def __init__(self, app: Any, context: Any, message: Message) -> None:
        self.app = app
        self.message = message
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, _NAMES.get(name, name))

    def __repr__(self) -> str:
        return f"<Request: {self._context.task}[{self._context.id}]>"


_NAMES = {"name": "task", "task_name": "task", "task_id": "id"}
