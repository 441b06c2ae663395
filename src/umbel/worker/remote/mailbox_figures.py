"""MailboxFigures: what `stats` tells of the mailbox, whichever shape it has (P6)."""

from typing import Protocol

from umbel.protocol.pidbox import Mailbox


class Counting(Protocol):
    """A mailbox that counts its own troubles."""

    @property
    def resets(self) -> int:
        """How often its subscription was restored after a fault."""
        ...

    @property
    def replies_dropped(self) -> int: ...


class MailboxFigures:
    """The control step says which mailbox it opened; the worker's state reads what that one counts."""

    def __init__(self) -> None:
        self._mailbox: Mailbox | None = None
        self._shell: Counting | None = None

    def read_from(self, mailbox: Mailbox, shell: Counting) -> None:
        self._mailbox, self._shell = mailbox, shell

    @property
    def resets(self) -> int:
        return 0 if self._shell is None else self._shell.resets

    @property
    def replies_dropped(self) -> int:
        return 0 if self._shell is None else self._shell.replies_dropped

    @property
    def malformed(self) -> int:
        return 0 if self._mailbox is None else self._mailbox.malformed

    @property
    def distrusted(self) -> int:
        return 0 if self._mailbox is None else self._mailbox.distrusted
