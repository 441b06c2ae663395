"""Audit: who did what from where, and the result; redacted, cut, and bounded.

An action is in the audit, on disk, before it is performed; if it cannot be written, it is not performed. An
entry names at most LISTED_MAX tasks, letters and nodes, with their number.

Each kind of entry has its own limit (`room_of`): logins, queries, failed logins and refusals cannot push out
the record of actions. An action that is refused for the visitor's role is stored without its arguments,
because a visitor who may do nothing must not fill the file.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from sqlite3 import Error as FileError
from time import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from umbel.errors import ConfigurationError, HistoryError
from umbel.monitor.records import CUT, redact_data, redact_text
from umbel.web.actions import ActionResult, AnyAction, AuditEntry
from umbel.web.http import Forbidden, Refused, Visitor
from umbel.web.settings import Role

if TYPE_CHECKING:
    from umbel.web.journal import Journal

log = logging.getLogger("umbel.web")

# ---- entries ---------------------------------------------------------------------------------------

LOGIN, LOGOUT, QUERY = "login", "logout", "query"
FAILED_LOGIN, LOCKED_OUT, REFUSED_REQUEST = "failed_login", "locked_out", "refused_request"
ROOMS = {LOGIN: 3000, LOGOUT: 3000, QUERY: 10_000, "failure": 1000, "refused": 1000, "action": 100_000}
"""How many entries of each kind are retained."""
LISTED_MAX = 20
TEXT_MAX = 2000
TARGET_MAX = 200


def note_of(
    action: str,
    who: str,
    role: str,
    address: str,
    *,
    target: str = "",
    arguments: dict[str, Any] | None = None,
    status: Literal["sent", "done", "refused"] = "done",
) -> AuditEntry:
    """Return an audit entry, redacted and cut: of a login, a query, a refused request, or an action."""
    return AuditEntry(
        id=0,
        at=time(),
        who=who[:TARGET_MAX],
        role=role,
        address=address,
        action=action,
        target=redact_text(target, TARGET_MAX),
        arguments=_cut(redact_data(arguments or {}, TEXT_MAX)),
        status=status,
    )


def entry_of(visitor: Visitor, action: AnyAction, status: Literal["sent", "refused"]) -> AuditEntry:
    """Return the audit entry of an action; a refused action is stored without its arguments."""
    arguments = msgspec.to_builtins(action)
    return note_of(
        name_of(action),
        visitor.name,
        visitor.role.value,
        visitor.address,
        target=_target(arguments),
        arguments={} if status == "refused" else arguments,
        status=status,
    )


def name_of(action: AnyAction) -> str:
    """Return the name of an action, as JSON has it."""
    return str(type(action).__struct_config__.tag)


def room_of(entry: AuditEntry) -> tuple[str, int]:
    """Return the group to whose limit an entry counts, and how many entries of the group are retained."""
    if entry.action in {LOGIN, LOGOUT, QUERY}:
        return f"{entry.action} {entry.role}", ROOMS[entry.action]
    is_failure = entry.action in {FAILED_LOGIN, LOCKED_OUT, REFUSED_REQUEST}
    room = "failure" if is_failure else "refused" if entry.status == "refused" else "action"
    return room, ROOMS[room]


def result_of(audit_id: int, outcome: dict[str, Any]) -> ActionResult:
    """Return the result of an action from the fields of its outcome, redacted."""
    is_done = not (outcome.get("problem") or outcome.get("silent") or outcome.get("refused"))
    clean = outcome | {"replies": redact_data(outcome.get("replies", {}), TEXT_MAX)}
    return ActionResult(audit_id=audit_id, done=is_done, **clean)


def ended(entry: AuditEntry, result: ActionResult) -> AuditEntry:
    """Return the entry of an action with its result."""
    fields = redact_data(msgspec.to_builtins(result, enc_hook=str), TEXT_MAX)
    replies = fields.pop("replies")  # not cut: there is at most one for each node
    status: Literal["done", "failed"] = "done" if result.done else "failed"
    return msgspec.structs.replace(entry, status=status, result=_cut(fields) | {"replies": replies})


def _target(arguments: dict[str, Any]) -> str:
    """Return what the action concerns, in at most TARGET_MAX characters."""
    for name in ("ids", "letters", "queue", "name", "task", "id", "text", "view"):
        found = arguments.get(name)
        if found:
            many = found if isinstance(found, list) else [found]
            more = f" and {len(many) - 1} more" if len(many) > 1 else ""
            return f"{str(many[0])[: TARGET_MAX - len(more)]}{more}"
    return ", ".join(arguments.get("nodes", ()))[:TARGET_MAX] or "all nodes"


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with long lists cut, and the number of items of each list that was cut."""
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        cut[name] = _beginning(value)
        if isinstance(value, list | dict) and len(value) > LISTED_MAX:
            cut[f"{name}_count"] = len(value)
    return cut


def _beginning(value: Any) -> Any:
    if isinstance(value, list):
        value = value[:LISTED_MAX]
    elif isinstance(value, dict):
        value = dict(list(value.items())[:LISTED_MAX])
    encoded = msgspec.json.encode(value, enc_hook=str)
    most = TEXT_MAX * LISTED_MAX
    return value if len(encoded) <= most else encoded[:TEXT_MAX].decode(errors="replace") + CUT


# ---- audit -----------------------------------------------------------------------------------------


class Audit:
    """Writes entries to the dashboard's file; `changed` is called with the number of each written entry."""

    def __init__(self, journal: "Journal", changed: Callable[[int], None]) -> None:
        self._journal, self._changed = journal, changed

    async def write(self, entry: AuditEntry) -> AuditEntry:
        """Write an entry and return it with its number; Refused if it cannot be written."""
        try:
            number = await asyncio.to_thread(self._journal.note, entry)
        except FileError as error:
            detail = f"{entry.action} refused: it cannot be written to the audit log: {error}"
            raise Refused(503, "Audit unavailable", detail) from None
        self._changed(number)
        return msgspec.structs.replace(entry, id=number)

    async def note(self, entry: AuditEntry) -> None:
        """Write an entry of something that happens even if it cannot be written, such as a login."""
        try:
            await self.write(entry)
        except Refused as refused:
            fields = {name: getattr(entry, name) for name in ("action", "who", "role", "address", "target")}
            log.error("cannot write to the audit log", extra=fields | {"why": refused.problem.detail})

    async def finish(self, entry: AuditEntry) -> None:
        """Replace an entry by the same entry with its result."""
        try:
            await asyncio.to_thread(self._journal.finish, entry)
        except FileError as error:
            fields = {"action": entry.action, "who": entry.who, "why": str(error)}
            log.error("dashboard action done, but its outcome is missing in the audit log", extra=fields)
        self._changed(entry.id)

    async def entries(self, *, limit: int = 100, before: int = 0) -> list[AuditEntry]:
        """Return entries, the newest first, older than the entry of the number `before` if it is given."""
        return await asyncio.to_thread(self._journal.audit, limit=limit, before=before)

    @asynccontextmanager
    async def query(self, visitor: Visitor, sql: str) -> AsyncIterator[Callable[[int], None]]:
        """Write a query before it runs, and afterwards the number of its rows, which is passed to the yielded
        function, or its problem.

        Forbidden if the visitor's role does not allow queries.
        """
        note = partial(
            note_of, QUERY, visitor.name, visitor.role.value, visitor.address, arguments={"sql": sql}
        )
        if not visitor.role.may(Role.OPERATOR):
            await self.write(note(status="refused"))
            raise Forbidden("queries need the role operator")
        entry = await self.write(note(status="sent"))
        rows: list[int] = []
        problem = "it was interrupted"
        try:
            yield rows.append
            problem = ""
        except (HistoryError, ConfigurationError, Refused) as error:
            problem = str(error)
            raise
        finally:
            status: Literal["done", "failed"] = "failed" if problem else "done"
            result = {"rows": sum(rows)} | ({"problem": redact_text(problem, TEXT_MAX)} if problem else {})
            await self.finish(msgspec.structs.replace(entry, status=status, result=result))
