"""Verdicts: how claims end, each as a whole or not at all.

A verdict names its claim by the tag "ticket:id". It is applied only while that very claim
stands; otherwise it is refused, and neither its result nor its follow-ups are kept.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from umbel.brokers.interface import Ack, Bury, Refused, Return, Settled, Started, Tag, Verdict
from umbel.brokers.sqlite import dead_letters, messages, rows
from umbel.wire.message import Outgoing, StoredResult


@dataclass(slots=True)
class Judgement:
    """What a batch of verdicts asks for, sorted by what there is to do."""

    conflicts: set[Tag] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)
    returned: list[tuple[int, Return]] = field(default_factory=list)
    buried: list[tuple[int, Bury]] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)  # failures, and why
    started: list[int] = field(default_factory=list)
    results: list[StoredResult] = field(default_factory=list)
    follow_ups: list[Outgoing] = field(default_factory=list)
    applied: int = 0


def judge(verdicts: Sequence[Verdict], standing: dict[Tag, int]) -> Judgement:
    """Sort the verdicts, given the claims that stand and the ids of their messages.

    A verdict that ends a claim takes it out of `standing`, so that a second one is refused.
    """
    judged = Judgement()
    for verdict in verdicts:
        number = standing.get(verdict.tag)
        if number is None:
            judged.conflicts.add(verdict.tag)
            continue
        judged.applied += 1
        if isinstance(verdict, Started):
            judged.started.append(number)
            continue
        del standing[verdict.tag]
        match verdict:
            case Ack():
                judged.finished.append(number)
                if verdict.keep:
                    judged.kept[number] = verdict.keep
            case Return():
                judged.returned.append((number, verdict))
                continue
            case Bury():
                judged.buried.append((number, verdict))
            case _:
                assert_never(verdict)
        judged.results.extend(verdict.results)
        judged.follow_ups.extend(verdict.follow_ups)
    return judged


def standing_claims(db: sqlite3.Connection, tags: Sequence[Tag]) -> dict[Tag, int]:
    """Those of these claims that stand, and the ids of their messages."""
    ids, tickets = db.execute(
        """SELECT json_group_array(id), json_group_array(ticket) FROM claimed
           WHERE id IN (SELECT value FROM json_each(?))""",
        (rows.pack(messages.number_of(tag) for tag in tags),),
    ).fetchone()
    return {
        messages.tag(ticket, number): number
        for number, ticket in zip(rows.ints(ids), rows.ints(tickets), strict=True)
    }


def apply(db: sqlite3.Connection, judged: Judgement, now_s: float) -> set[str]:
    """Do what the verdicts ask for, but for results and follow-ups; the queues that grew."""
    grown: set[str] = set()
    for number in judged.started:
        messages.mark(db, [number], starts=1, redelivered=False)
    for number, verdict in judged.returned:
        messages.mark(db, [number], starts=int(verdict.charged), redelivered=verdict.ran)
    at_once = [number for number, verdict in judged.returned if verdict.not_before <= now_s]
    if at_once:
        grown |= messages.put_back(db, at_once)
    for number, verdict in judged.returned:
        if verdict.not_before > now_s:
            grown |= messages.park(db, number, verdict.not_before)
    for number, burial in judged.buried:
        messages.mark(db, [number], starts=int(burial.charged), redelivered=False)
        judged.finished.append(number)
    if judged.buried:
        dead_letters.bury(db, {number: burial.reason for number, burial in judged.buried}, now_s)
    if judged.finished:
        messages.remove(db, judged.finished)
    return grown


def settled(judged: Judgement, refused: Sequence[Refused]) -> Settled:
    return Settled(judged.applied, frozenset(judged.conflicts), tuple(refused))
