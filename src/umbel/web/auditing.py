"""Auditing: what is written down of an action, and of what came of it; redacted and cut.

An entry names at most LISTED_MAX of the tasks, letters and nodes that an action concerned, with their number
beside them. Of an action that was refused for its role only the target is kept: whoever may not act must
not fill the file.
"""

from time import time
from typing import Any, Literal

import msgspec

from umbel.web.actions import ActionResult, AnyAction, AuditEntry
from umbel.web.redaction import CUT, redact_data
from umbel.web.site import Visitor

LISTED_MAX = 20
TEXT_MAX = 2000
TARGET_MAX = 200


def entry_of(visitor: Visitor, action: AnyAction, status: Literal["sent", "refused"]) -> AuditEntry:
    arguments = msgspec.to_builtins(action)
    return AuditEntry(
        id=0,
        at=time(),
        who=visitor.name,
        role=visitor.role.value,
        address=visitor.address,
        action=name_of(action),
        target=_target(arguments)[:TARGET_MAX],
        arguments={} if status == "refused" else _cut(redact_data(arguments, TEXT_MAX)),
        status=status,
    )


def ended(entry: AuditEntry, result: ActionResult) -> AuditEntry:
    kept = redact_data(msgspec.to_builtins(result, enc_hook=str), TEXT_MAX)
    replies = {"replies": kept.pop("replies", {})}  # as many as there are nodes
    status: Literal["done", "failed"] = "done" if result.done else "failed"
    return msgspec.structs.replace(entry, status=status, result=_cut(kept) | replies)


def result_of(audit_id: int, outcome: dict[str, Any]) -> ActionResult:
    fine = not (outcome.get("problem") or outcome.get("silent") or outcome.get("refused"))
    clean = outcome | {"replies": redact_data(outcome.get("replies", {}), TEXT_MAX)}
    return ActionResult(audit_id=audit_id, done=fine, **clean)


def name_of(action: AnyAction) -> str:
    return str(type(action).__struct_config__.tag)


def _target(arguments: dict[str, Any]) -> str:
    for name in ("ids", "letters", "queue", "name", "task", "id", "text", "view"):
        found = arguments.get(name)
        if found:
            many = found if isinstance(found, list) else [found]
            more = f" and {len(many) - 1} more" if len(many) > 1 else ""
            return f"{str(many[0])[: TARGET_MAX - len(more)]}{more}"
    return ", ".join(arguments.get("nodes", ())) or "all nodes"


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the beginnings of long ones, and how many there were."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        kept[name] = _beginning(value)
        if isinstance(value, list | dict) and len(value) > LISTED_MAX:
            kept[f"{name}_count"] = len(value)
    return kept


def _beginning(value: Any) -> Any:
    if isinstance(value, list):
        value = value[:LISTED_MAX]
    elif isinstance(value, dict):
        value = dict(list(value.items())[:LISTED_MAX])
    written = msgspec.json.encode(value, enc_hook=str)
    most = TEXT_MAX * LISTED_MAX
    return value if len(written) <= most else written[:TEXT_MAX].decode(errors="replace") + CUT
