"""Base classes of tasks."""

from typing import Any, ClassVar

from celery import Task


class Audited(Task):
    """Notes how its tasks ended."""

    abstract = True
    ended: ClassVar[dict[str, str]] = {}

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.ended[task_id] = "success"

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.ended[task_id] = "failure"


class WithCart(Audited):
    """Opens what its tasks share once in a process."""

    abstract = True
    _cart: list[str] | None = None

    @property
    def cart(self) -> list[str]:
        if self._cart is None:
            self._cart = []
        return self._cart
