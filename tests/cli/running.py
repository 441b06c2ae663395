"""What running a command in this process gives back."""

from typing import NamedTuple, Protocol


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Umbel(Protocol):
    def __call__(self, *arguments: str) -> Ran: ...
