"""Verdicts: from a batch of them to the arguments of `settle.lua`, which explains their order."""

from collections.abc import Container, Iterable, Sequence
from typing import Any, assert_never

from umbel.brokers.interface import Ack, Bury, Return, Started, Tag, Verdict
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.publishing import delivery_tags, parkable
from umbel.wire.envelope_redis import seal, seal_result
from umbel.wire.message import Outgoing, StoredResult


def settle_arguments(keys: Keys, verdicts: Iterable[Verdict], ttl_ms: int, here: Container[str]) -> list[Any]:
    """Everything after prefix, owner, epoch and check. `here`: the queues this process consumes."""
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
        *result_arguments(keys, [one for one in results if not one.reply_to], ttl_ms),
        *_pushes(keys, follow_ups, [one for one in results if one.reply_to], ttl_ms, here),
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


def _pushes(
    keys: Keys,
    follow_ups: Sequence[Outgoing],
    letters: Sequence[StoredResult],
    ttl_ms: int,
    here: Container[str],
) -> list[Any]:
    if not follow_ups and not letters:
        return [0, 0]
    later = [one for one in follow_ups if one.not_before and one.queue in here]
    now = [one for one in follow_ups if not (one.not_before and one.queue in here)]
    lists: dict[tuple[str, int], list[bytes]] = {}
    tags = iter(delivery_tags(len(now) + len(letters)))
    for outgoing in now:
        key = keys.list_of(outgoing.queue, outgoing.message.priority)
        envelope = seal(outgoing.message, outgoing.queue, next(tags), outgoing.not_before)
        lists.setdefault((key, 0), []).append(envelope)
    for letter in letters:
        key = keys.list_of(letter.reply_to, 0)
        lists.setdefault((key, ttl_ms), []).append(seal_result(letter, next(tags)))
    args: list[Any] = [len(lists)]
    for (key, list_ttl_ms), envelopes in lists.items():
        args += (key, list_ttl_ms, len(envelopes), *envelopes)
    parked = parkable(keys, later, here)
    return [*args, len(parked) // 4, *parked]
