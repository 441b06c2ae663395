"""What `chord` makes: a chord, or a header that waits for its body."""

from collections.abc import Iterable
from typing import Any, overload

from umbel.app.canvas.group import Chord, Group
from umbel.app.canvas.signature import Signature
from umbel.app.results import AsyncResult


class OpenChord:
    """A header that waits for its body: `chord(header)(body)` sends the two."""

    def __init__(self, header: Iterable[Signature[Any]]) -> None:
        self._header = list(header.members if isinstance(header, Group) else header)

    def __call__(self, body: Signature[Any], **options: Any) -> AsyncResult[Any]:
        return Chord(self._header, body).apply_async(**options)


@overload
def chord(header: Iterable[Signature[Any]], body: Signature[Any]) -> Chord: ...
@overload
def chord(header: Iterable[Signature[Any]], body: None = None) -> OpenChord: ...
def chord(header: Iterable[Signature[Any]], body: Signature[Any] | None = None) -> Chord | OpenChord:
    """Run the header's calls side by side, then the body with the list of their results.

    Without a body it waits for one: `chord(header)(body)` sends both.
    """
    return OpenChord(header) if body is None else Chord(header, body)
