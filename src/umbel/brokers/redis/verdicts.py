"""Verdicts: from a batch of them to the arguments of `settle.lua`, and from its reply to the refusals.

Redis accepts about half a gigabyte in one argument and a gigabyte in one call, and closes the connection on
more. So large verdicts go in several calls, and a verdict that is too large for one call loses parts, which
are refused before they are sent.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec

from umbel.brokers.interface import Ack, Bury, Refused, Return, Started, Tag, Verdict
from umbel.brokers.redis.keys import APART, Keys
from umbel.brokers.redis.publishing import (
    BATCH_BYTES_MAX,
    CALL_BYTES_MAX,
    delivery_tags,
    parkable,
    sealed,
    weight_of,
)
from umbel.brokers.redis.scripts import SETTLE_SECTIONS
from umbel.wire.envelope_redis import seal_result, unseal
from umbel.wire.message import Outgoing, StoredResult

Part = Outgoing | StoredResult
_SENDING = (Ack, Bury)  # a union type would be built at each isinstance


@dataclass(slots=True)
class Settlement:
    """One call of the script: the sections of its arguments, and what their entries stand for."""

    sections: dict[str, Sequence[Any]]  # by the names in `SETTLE_SECTIONS`
    results: list[StoredResult] = field(default_factory=list)
    pushed: list[Part] = field(default_factory=list)  # in the order of `envelopes`
    delayed: list[Outgoing] = field(default_factory=list)

    def arguments(self) -> list[Any]:
        """The sections as arguments of the script."""
        made: list[Any] = []
        for name, width in SETTLE_SECTIONS.items():
            section = self.sections.get(name, ())
            made.append(len(section) // width)
            made += section
        return made

    def refused(self, keys: Keys, reply: Sequence[Any]) -> Iterator[Refused]:
        """The parts that the script's reply refuses, with the reasons."""
        for at in range(0, len(reply), 4):
            section, place, reason, envelope = reply[at : at + 4]
            why = reason.decode(errors="replace")
            match section:
                case b"results":
                    yield Refused(self.results[place], why)
                case b"envelopes":
                    yield Refused(self.pushed[place], why)
                case b"delayed":
                    yield Refused(self.delayed[place], why)
                case _:  # a claimed message that could not be moved where its verdict says
                    tag = self.sections["others"][SETTLE_SECTIONS["others"] * place + 1]
                    queue = keys.queue_of(tag.split(":", 2)[2])
                    yield Refused(Outgoing(queue, unseal(envelope).message), why)


def settlement(
    keys: Keys,
    verdicts: Iterable[Verdict],
    ttl_ms: int,
    here: Container[str],
    *,
    keep_limits: str = "",
    marks: Sequence[str] = (),
) -> Settlement:
    """The call for these verdicts.

    `here`: the queues that this process consumes. `keep_limits`: how many failures are retained, and how
    long. `marks`: the keys of the signatures whose messages end.
    """
    done: list[Tag] = []
    results: list[StoredResult] = []
    follow_ups: list[Outgoing] = []
    others: list[Any] = []
    for verdict in verdicts:
        match verdict:
            case Ack(tag, keep=""):
                done.append(tag)
            case Ack(tag, keep=why):
                others += (f"keep {keep_limits}", tag, 0, why.encode(errors="backslashreplace"))
            case Return(tag, charged, ran, not_before):
                others += (f"return {not_before:.6f}", tag, int(charged), "ran" if ran else "")
                continue
            case Bury(tag, reason, charged):
                others += ("bury", tag, int(charged), reason.encode(errors="backslashreplace"))
            case Started(tag):
                others += ("started", tag, 1, "")
                continue
            case _:
                assert_never(verdict)
        results += verdict.results
        follow_ups += verdict.follow_ups
    stored = [result for result in results if not result.reply_to]
    sections: dict[str, Sequence[Any]] = {
        "done": done,
        "results": result_arguments(keys, stored),
        "others": others,
        # A queue's name may contain the sign, too: removing a missing list does nothing.
        "apart": [tag for tag in done if f"{APART}:" in str(tag)],
        "marks": marks,
    }
    made = Settlement(sections, stored)
    if follow_ups or len(stored) < len(results):
        _add_pushes(made, keys, follow_ups, [result for result in results if result.reply_to], ttl_ms, here)
    return made


def result_arguments(keys: Keys, results: Sequence[StoredResult]) -> list[Any]:
    """The key and payload of each result, for the scripts that store results."""
    args: list[Any] = []
    for result in results:
        args += (keys.result(result.task_id), result.payload)
    return args


def ttl_ms_of(expires_s: float) -> int:
    """How long a result is stored, in milliseconds; 0 is for ever, as in Celery."""
    return max(1, round(expires_s * 1000)) if expires_s > 0 else 0


def in_calls(verdicts: Sequence[Verdict]) -> tuple[Sequence[Sequence[Verdict]], list[Refused]]:
    """The verdicts of each call, and the parts of verdicts that are too large for any call."""
    if sum(map(_weight, verdicts)) <= CALL_BYTES_MAX:
        return [verdicts], []
    calls: list[list[Verdict]] = [[]]
    refused: list[Refused] = []
    total = 0
    for verdict in verdicts:
        sent, weight = verdict, _weight(verdict)
        if weight > BATCH_BYTES_MAX and isinstance(verdict, Ack | Bury):
            sent, weight = _lightened(verdict, refused)
        if total + weight > CALL_BYTES_MAX and calls[-1]:
            calls.append([])
            total = 0
        calls[-1].append(sent)
        total += weight
    return calls, refused


def follow_ups_of(verdicts: Iterable[Verdict]) -> list[Outgoing]:
    """The messages that these verdicts send."""
    return [
        follow_up for verdict in verdicts if isinstance(verdict, _SENDING) for follow_up in verdict.follow_ups
    ]


def _weight(verdict: Verdict) -> int:
    weight = 0
    if isinstance(verdict, _SENDING):
        for result in verdict.results:
            weight += len(result.payload)
        for follow_up in verdict.follow_ups:
            weight += weight_of(follow_up)
    return weight


def _lightened(verdict: Ack | Bury, refused: list[Refused]) -> tuple[Ack | Bury, int]:
    """The verdict without the parts beyond the limit, and the size of the parts that remain."""
    total = 0

    def fits(part: Part) -> bool:
        nonlocal total
        weight = weight_of(part)
        if total + weight <= BATCH_BYTES_MAX:
            total += weight
            return True
        refused.append(
            Refused(
                part, f"its {weight:,} bytes and the task's other results exceed {BATCH_BYTES_MAX:,} bytes"
            )
        )
        return False

    results = [result for result in verdict.results if fits(result)]
    follow_ups = [follow_up for follow_up in verdict.follow_ups if fits(follow_up)]
    return msgspec.structs.replace(verdict, results=results, follow_ups=follow_ups), total


def _add_pushes(
    made: Settlement,
    keys: Keys,
    follow_ups: Sequence[Outgoing],
    replies: Sequence[StoredResult],
    ttl_ms: int,
    here: Container[str],
) -> None:
    """Add the sections with follow-ups, and with results for the clients that asked for them."""
    made.delayed = [follow_up for follow_up in follow_ups if follow_up.not_before and follow_up.queue in here]
    now = [follow_up for follow_up in follow_ups if not (follow_up.not_before and follow_up.queue in here)]
    lists: dict[tuple[str, int | str], list[tuple[Part, bytes]]] = {}
    tags = iter(delivery_tags(len(now) + len(replies)))
    for outgoing in now:
        key = keys.list_of(outgoing.queue, outgoing.message.priority)
        envelope = sealed(outgoing, next(tags), outgoing.not_before)
        lists.setdefault((key, ""), []).append((outgoing, envelope))
    for reply in replies:
        key = keys.list_of(reply.reply_to, 0)
        lists.setdefault((key, ttl_ms), []).append((reply, seal_result(reply, next(tags))))
    pushed = [push for pushes in lists.values() for push in pushes]
    made.pushed = [part for part, _ in pushed]
    made.sections |= {
        "lists": [part for place, pushes in lists.items() for part in (*place, len(pushes))],
        "envelopes": [envelope for _, envelope in pushed],
        "delayed": parkable(keys, made.delayed, here),
    }
