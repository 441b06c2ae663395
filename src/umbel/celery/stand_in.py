"""WorkerStandIn: what handlers of Celery's signals get where Celery would send its worker object."""

from typing import Any, NoReturn


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
