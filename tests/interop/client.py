"""A client of either library: evaluates the expressions it is sent, one JSON line each.

Both libraries have the same words for tasks, canvas and results, so a test writes an expression
once and has it evaluated by the client it is about. Run with Celery's Python or with ours.
"""

import json
import sys
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

# Found by PYTHONPATH: they have one name on both sides.
import shared_tasks  # type: ignore[import-not-found]
from span_files import in_one_span, instrument_client  # type: ignore[import-not-found]

WAIT_S = 30.0


def get(result: Any, **options: Any) -> Any:
    return result.get(timeout=WAIT_S, **options)


def get_own(result: Any) -> Any:
    """The result of this very task: Celery's `get` raises the errors of those before it, too."""
    return get(shared_tasks.app.AsyncResult(result.id))


def as_map(signature: Any) -> dict[str, Any]:
    return dict(signature) if isinstance(signature, dict) else dict(signature.to_map())


NAMES = {
    **vars(shared_tasks),
    "get": get,
    "get_own": get_own,
    "as_map": as_map,
    "in_one_span": in_one_span,
    "UTC": UTC,
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
    "timezone": timezone,
    "Decimal": Decimal,
    "UUID": UUID,
}


def main() -> None:
    instrument_client(shared_tasks.LIBRARY)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"number": asked["number"], **answer(asked)}, default=str), flush=True)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": eval(asked["expression"], NAMES | asked["names"])}
    except Exception as error:
        kind = type(error)
        return {
            "raised": {
                "kind": kind.__name__,
                "module": kind.__module__,
                "args": list(error.args),
                "text": str(error),
                "is_known": getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind,
            }
        }


if __name__ == "__main__":
    main()
