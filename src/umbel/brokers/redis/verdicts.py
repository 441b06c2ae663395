"""Verdicts: from a batch of them to the arguments of `settle.lua`, which explains their order."""

from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from umbel.brokers.interface import Ack, Bury, Return, Started, Tag, Verdict
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.publishing import delivery_tags, parkable
from umbel.wire.envelope_redis import seal
from umbel.wire.message import Outgoing, StoredResult


def settle_arguments(keys: Keys, verdicts: Iterable[Verdict], ttl_ms: int) -> list[Any]:
    """Everything after prefix, owner, epoch and check."""
    done: list[Tag] = []
    results: list[StoredResult] = []
    follow_ups: list[Outgoing] = []
    others: list[Any] = []
    for verdict in verdicts:
        match verdict:
            case Ack(tag):
                done.append(tag)
            case Return(tag, charged, ran, not_before):
                others += (f"return {not_before:.6f}", tag, int(charged), "ran" if ran else "")
                continue
            case Bury(tag, reason, charged):
                others += ("bury", tag, int(charged), reason)
            case Started(tag):
                others += ("started", tag, 1, "")
                continue
            case _:
                assert_never(verdict)
        results += verdict.results
        follow_ups += verdict.follow_ups
    return [
        len(done),
        *done,
        *result_arguments(keys, results, ttl_ms),
        *_follow_ups(keys, follow_ups),
        len(others) // 4,
        *others,
    ]


def result_arguments(keys: Keys, results: Sequence[StoredResult], ttl_ms: int) -> list[Any]:
    args: list[Any] = [len(results), ttl_ms]
    for result in results:
        args += (keys.result(result.task_id), result.payload)
    return args


def ttl_ms_of(expires_s: float) -> int:
    """How long a result is kept; 0 is for ever, as Celery has it."""
    return max(1, round(expires_s * 1000)) if expires_s > 0 else 0


def _follow_ups(keys: Keys, follow_ups: Sequence[Outgoing]) -> list[Any]:
    if not follow_ups:
        return [0, 0]
    now = [one for one in follow_ups if not one.not_before]
    lists: dict[str, list[bytes]] = {}
    for outgoing, tag in zip(now, delivery_tags(len(now)), strict=True):
        key = keys.list_of(outgoing.queue, outgoing.message.priority)
        lists.setdefault(key, []).append(seal(outgoing.message, outgoing.queue, tag))
    args: list[Any] = [len(lists)]
    for key, envelopes in lists.items():
        args += (key, len(envelopes), *envelopes)
    later = parkable(keys, (one for one in follow_ups if one.not_before))
    return [*args, len(later) // 4, *later]
