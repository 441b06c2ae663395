"""Tasks told in seconds: rows of `tasks`, `attempts` and `timeline` that fit to one another."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tests.history.published import BEGAN, Rows

ENDINGS = {"SUCCESS": "succeeded", "FAILURE": "failed", "REVOKED": "revoked", "RETRY": "retried"}


@dataclass(frozen=True)
class Try:
    """One attempt: when it was sent, when it started each time, and when and how it ended."""

    sent: float | None
    starts: tuple[float, ...] = ()
    ended: float | None = None
    outcome: str | None = "SUCCESS"
    received: float | None = None
    waited: float | None = None  # unless since it was sent


@dataclass
class Told:
    tasks: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> Rows:
        return {"tasks": self.tasks, "attempts": self.attempts, "timeline": self.timeline}

    def task(
        self,
        task_id: str,
        *tries: Try,
        name: str = "",
        root: str = "",
        parent: str | None = None,
        queue: str | None = "q",
        eta: float | None = None,
    ) -> None:
        described = {"task_id": task_id, "name": name or task_id, "queue": queue}
        described |= {"root_id": root or task_id, "parent_id": parent}
        rows = [self._attempt(number, one, described) for number, one in enumerate(tries)]
        last, starts = rows[-1], [at(start) for one in tries for start in one.starts]
        sent = [row["sent_at"] for row in rows if row["sent_at"]]
        received = [row["received_at"] for row in rows if row["received_at"]]
        self.tasks.append(
            described
            | {name: last[name] for name in ("state", "state_at", "clock", "wait_s", "run_s", "started_at")}
            | {"retries": len(tries) - 1, "n_deliveries": 1, "n_terminal": 1}
            | {"eta": at(eta).isoformat() if eta is not None else None}
            | {"sent_at": max(sent, default=None), "first_sent_at": min(sent, default=None)}
            | {
                "first_received_at": min(received, default=None),
                "first_started_at": min(starts, default=None),
            }
        )

    def _attempt(self, number: int, one: Try, described: dict[str, Any]) -> dict[str, Any]:
        begun = one.sent if one.sent is not None else one.received
        waited = one.starts[-1] - begun if one.starts and begun is not None else None
        ended = one.outcome if one.ended is not None else None
        row = described | {
            "attempt": number,
            "state": ended or ("STARTED" if one.starts else "RECEIVED"),
            "state_at": at(max(x for x in (one.sent, one.received, *one.starts, one.ended) if x is not None)),
            "clock": 1,
            "sent_at": at(one.sent),
            "received_at": at(one.received),
            "started_at": at(one.starts[-1] if one.starts else None),
            "ended_at": at(one.ended),
            "outcome": ended,
            "n_deliveries": max(len(one.starts), 1),
            "n_terminal": 1,
            "out_of_order": False,
            "wait_s": one.waited if one.waited is not None else waited,
            "run_s": one.ended - one.starts[-1] if one.starts and one.ended is not None else None,
        }
        self.attempts.append(row)
        for start in one.starts:
            self._event(described["task_id"], number, "task-started", start)
        if one.ended is not None:
            self._event(described["task_id"], number, f"task-{ENDINGS[one.outcome or 'SUCCESS']}", one.ended)
        return row

    def _event(self, task_id: str, attempt: int, kind: str, seconds: float) -> None:
        rank = len(self.timeline) + 1
        self.timeline.append(
            {
                "subject": task_id,
                "task_id": task_id,
                "rank": rank,
                "attempt": attempt,
                "type": kind,
                "timestamp": at(seconds),
                "recorded_at": at(seconds),
                "clock": rank,
                "digest": rank,
                "hostname": "w1@shop",
            }
        )


def at(seconds: float | None) -> Any:
    return None if seconds is None else BEGAN + timedelta(seconds=seconds)


def seconds(moment: datetime) -> float:
    return (moment - BEGAN).total_seconds()
