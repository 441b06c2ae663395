"""Hiding: the arguments of a task that names some as `sensitive`, where nobody has masked them yet.

Umbel's clients and workers mask them before they make a text of a call. Celery's do not, so what waits in a
queue, or was sent and not yet received, may have them in the open. A text without any mask is not shown.
"""

from collections.abc import Callable

from umbel.protocol.delivery.sensitive import MASK

Hides = Callable[[str | None], bool]  # whether the task of that name has sensitive arguments


def hides_nothing(_name: str | None) -> bool:
    return False


def is_open(args: str | None, kwargs: str | None) -> bool:
    """Whether the texts have arguments, and none of them is masked."""
    return bool(args or kwargs) and MASK not in (args or "") and MASK not in (kwargs or "")
