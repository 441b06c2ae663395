"""View: the query behind a name, and what its columns hold."""

from dataclasses import dataclass

from umbel.events.columns import Kind
from umbel.events.tables import Table, TableColumn

ENDED = "('SUCCESS', 'FAILURE', 'REVOKED')"
"""States that a task does not leave."""

ANY_TASKS = "tasks_unfiltered"
ANY_TIME = "attempts_any_time"
"""What a view reads where a filter would falsify it: a workflow has tasks outside the time that is asked for,
and what waited at its end had been sent before it."""


@dataclass(frozen=True)
class View:
    """`parameters`: of a view that is called, as `name := default` where there is one.

    `first`: a statement that makes what the query uses.
    """

    table: Table
    sql: str
    parameters: tuple[str, ...] = ()
    first: str = ""

    @property
    def statements(self) -> tuple[str, ...]:
        """What makes it."""
        made = f"create view {self.table.name} as {self.sql}"
        if self.parameters:
            made = f"create macro {self.table.name}({', '.join(self.parameters)}) as table {self.sql}"
        return (self.first, made) if self.first else (made,)

    @property
    def source(self) -> str:
        """What to write after FROM."""
        return f"{self.table.name}()" if self.parameters else self.table.name

    @property
    def heading(self) -> str:
        return f"{self.table.name}({', '.join(self.parameters)})" if self.parameters else self.table.name


def sure(name: str, kind: Kind, doc: str) -> TableColumn:
    """A column that is never null."""
    return TableColumn(name, kind, doc, nullable=False)
