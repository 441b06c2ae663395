"""The scripts decide elections and leases as the pure functions do, over random histories."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers.redis import RedisServer
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.coordination import RedisCoordination
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.protocol.leadership import coordination as rules
from umbel.protocol.leadership.coordination import (
    ElectionRecord,
    ElectionRequest,
    Granted,
    Instant,
    LeaseRecord,
    Policy,
    StoreFacts,
)

START = 1_000_000.0
HOLDERS = ("ada.1", "bob.2")
KEYS = ("k1", "k2")
VERBS = (
    *("open", "claim", "claim", "claim", "start", "renew", "finish", "unfinished", "wait"),
    *("acquire", "acquire", "renew_lease", "release", "update", "read_lease"),
)


@dataclass
class Model:
    """The store as the pure functions see it. One clock stands for both, as on a server."""

    now: float = START
    born: float | None = None
    last_term: int = 0
    elections: dict[str, ElectionRecord] = field(default_factory=dict)
    leases: dict[str, LeaseRecord] = field(default_factory=dict)

    @property
    def instant(self) -> Instant:
        return Instant(self.now, self.now)

    def facts(self) -> StoreFacts:
        if self.born is None:
            self.born = self.now
        return StoreFacts(self.born, self.last_term)

    def open(self, key: str, request: ElectionRequest) -> ElectionRecord:
        self.facts()
        record = rules.open_election(self.elections.get(key), request, self.instant)
        self.elections[key] = record
        return record

    def claim(self, key: str, holder: str, request: ElectionRequest, ttl_s: float) -> rules.ElectionReply:
        record, reply = rules.claim_election(
            self.elections.get(key), holder, request, ttl_s=ttl_s, now=self.instant, store=self.facts()
        )
        if record is not None:
            self.elections[key] = record
            self.last_term = max(self.last_term, record.term)
        return reply

    def change(self, key: str, record: ElectionRecord | None) -> bool:
        if record is not None:
            self.elections[key] = record
        return record is not None

    def acquire(self, name: str, holder: str, ttl_s: float) -> rules.LeaseReply:
        record, reply = rules.acquire_lease(
            self.leases.get(name), holder, ttl_s=ttl_s, now=self.instant, last_term=self.facts().last_term
        )
        self.leases[name] = record
        self.last_term = max(self.last_term, record.term)
        return reply

    def change_lease(self, name: str, record: LeaseRecord | None) -> bool:
        if record is not None:
            self.leases[name] = record
        return record is not None


moves = st.tuples(
    st.sampled_from(VERBS),
    st.sampled_from(KEYS),
    st.sampled_from(HOLDERS),
    st.sampled_from([0.0, 0.25, 4.0, 9.75, 10.0, 10.25, 400.0]),  # how long to wait before
    st.sampled_from([0, 0, 0, 1]),  # added to the term that is named
    st.sampled_from(list(Policy)),
)


@pytest.fixture(scope="module")
def prefixes() -> Iterator[Any]:
    return count()


@settings(max_examples=150 if os.environ.get("UMBEL_SOAK") else 50)
@given(st.lists(moves, max_size=40), st.sampled_from([-50.0, 0.0, 5.0]))
def test_the_scripts_decide_as_the_pure_functions_do(
    redis_server: RedisServer, prefixes: Iterator[int], history: list[Any], asked_before: float
) -> None:
    asyncio.run(_compare(redis_server, f"{next(prefixes)}:", history, START + asked_before))


async def _compare(server: RedisServer, prefix: str, history: list[Any], asked_at: float) -> None:
    link = Link(parse_addresses(server.url), timeout_s=10)
    store, model = RedisCoordination(link, Keys(prefix, 0)), Model()
    for verb, key, holder, pause_s, off, policy in history:
        model.now += pause_s
        store.clock = f"{model.now:.6f}"
        asked = ElectionRequest(key, "task", b"{}", policy, asked_at)
        term = off + (model.elections[key].term if key in model.elections else 0)
        lease_term = off + (model.leases[key].term if key in model.leases else 0)
        wanted, got = await _do(store, model, verb, key, holder, asked, term, lease_term)
        assert got == wanted, f"{verb} {key} by {holder} at {model.now}"
        assert await store.read_election(key) == model.elections.get(key)
        assert await store.read_lease(key) == rules.read_lease(model.leases.get(key), model.instant)
    link.close()


async def _do(
    store: RedisCoordination,
    model: Model,
    verb: str,
    key: str,
    holder: str,
    asked: ElectionRequest,
    term: int,
    lease_term: int,
) -> tuple[object, object]:
    """What the model and the store answer to the same move."""
    record, lease, now = model.elections.get(key), model.leases.get(key), model.instant
    match verb:
        case "open":
            return model.open(key, asked), await store.open_election(key, asked)
        case "claim":
            wanted: Any = model.claim(key, holder, asked, 10.0)
            return wanted, await store.claim_election(key, holder, asked, ttl_s=10.0)
        case "start":
            wanted = model.change(key, rules.start_election(record, holder, term, now))
            return wanted, await store.start_election(key, holder, term)
        case "renew":
            wanted = model.change(key, rules.renew_election(record, holder, term, now))
            return wanted, await store.renew_election(key, holder, term)
        case "finish":
            wanted = model.change(key, rules.finish_election(record, holder, term, "ok", now))
            return wanted, await store.finish_election(key, holder, term, "ok")
        case "unfinished":
            wanted = {name for name, one in model.elections.items() if rules.is_unfinished(one, now)}
            return wanted, {name for name, _ in await store.unfinished_elections(10)}
        case "acquire":
            wanted = model.acquire(key, holder, 10.0)
            return wanted, await store.acquire_lease(key, holder, ttl_s=10.0)
        case "renew_lease":
            kept = rules.renew_lease(lease, holder, lease_term, ttl_s=10.0, now=now)
            return model.change_lease(key, kept), await store.renew_lease(key, holder, lease_term, ttl_s=10.0)
        case "release":
            kept = rules.release_lease(lease, holder, lease_term, now)
            return model.change_lease(key, kept), await store.release_lease(key, holder, lease_term)
        case "update":
            kept = rules.update_lease(lease, holder, lease_term, b"\x00data", now)
            return model.change_lease(key, kept), await store.update_lease(
                key, holder, lease_term, b"\x00data"
            )
    return None, None


def test_terms_go_on_rising_when_the_server_has_forgotten_everything(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        link = Link(parse_addresses(redis_server.url), timeout_s=10)
        store = RedisCoordination(link, Keys("", 0))
        old = await store.acquire_lease("beat", "ada", ttl_s=10)
        redis_server.ask("FLUSHALL")
        new = await store.acquire_lease("beat", "bob", ttl_s=10)
        assert new.granted and new.term > old.term
        assert not await store.renew_lease("beat", "ada", old.term, ttl_s=10)
        asked = ElectionRequest("e", "task", b"{}", Policy.AT_MOST_ONCE, asked_at=1.0)
        reply = await store.claim_election("k", "ada", asked, ttl_s=10)
        assert not isinstance(reply, Granted)  # asked before the store was born
        assert isinstance(
            await store.claim_election("k2", "ada", replace(asked, asked_at=9e9), ttl_s=10), Granted
        )
        link.close()

    asyncio.run(scenario())
