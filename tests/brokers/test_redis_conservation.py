"""No script loses or doubles a message, whatever lies in Redis (N1, N2).

Every message carries a token. After each step each token that is expected is found exactly once in all of
Redis: ready, delayed, waiting for a limit, claimed, handed over or dead. What a step reports, and
nothing else, changes what is expected.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.brokers.tokens import FAR, HOSTILE, outgoing_of, token_in, token_of, tokens_in
from tests.brokers.under_test import OWNER, PEER, QUEUE, BrokerUnderTest, result, run
from tests.servers.redis import RedisServer
from umbel.brokers.interface import Ack, Broker, Bury, Delivery, Pause, Permit, Return, Started, Verdict
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import script
from umbel.errors import BrokerError
from umbel.protocol.delivery.limits import Concurrency, Rate
from umbel.wire.message import Outgoing

EXAMPLES = 1500 if os.environ.get("UMBEL_SOAK") else 150
OTHER = "other"
LEASE_S = 1000
FIELDS = [
    "{list}",
    "",
    "x",
    "t.1:1+:{list}",
    ":::",
    "t:1:",
    "t.zz:y:{list}",
    "t.f:99999999999999999999999:{list}",
    "epochs",
]
MEMBERS = [*(f"{field}\0{{envelope}}" for field in FIELDS), "{envelope}"]
SCORES = ["-inf", "+inf", "0", "1.5", "-9e99", "9e99", f"{FAR}"]
BUCKETS = ["t:a", "t:b"]
KEYS_APART = """
local found = {}
for _, key in ipairs(redis.call('KEYS', 'umbel.apart.*')) do found[#found + 1] = string.sub(key, 13) end
return found
"""
FIELDS_CLAIMED = """
local found = {}
for _, key in ipairs(redis.call('KEYS', 'umbel.inflight.*')) do
  for _, field in ipairs(redis.call('HKEYS', key)) do found[#found + 1] = field end
end
return found
"""
BREAKABLE = [
    *(
        QUEUE,
        f"{QUEUE}\x06\x163",
        OTHER,
        "umbel.dead",
        f"umbel.delayed.{QUEUE}",
        "umbel.queues",
        "umbel.paused",
    ),
    *("umbel.slots.t:a", "umbel.waiting.t:b", "umbel.limit.t:a", "umbel.limits", "umbel.waits"),
]
TEXTS = {
    "umbel.contact": "yesterday",
    "umbel.revokes.cursor": "first",
    "umbel.dead.dropped": "many",
    "umbel.grace": "never",
}


class World:
    """A Redis, what is expected in it, and the steps that may be taken."""

    def __init__(self, server: RedisServer, broker: Broker) -> None:
        assert isinstance(broker, RedisBroker)
        self.server = server
        self.broker = broker
        self.link: Link = broker._link
        self.claims = broker._claims
        self.expected: Counter[int] = Counter()
        self.held: dict[str, list[Delivery]] = {OWNER: [], PEER: []}
        self.made = 0

    def token(self) -> int:
        self.made += 1
        self.expected[self.made] += 1
        return self.made

    def hostile(self, chance: random.Random) -> bytes:
        text = chance.choice(HOSTILE).replace("T", str(self.token()))
        return text.encode("latin-1")

    def message(self, queue: str, not_before: float = 0.0, priority: int = 0) -> Outgoing:
        return outgoing_of(self.token(), queue, not_before, priority)

    def check(self, step: str) -> None:
        found = tokens_in(self.server)
        lost, more = self.expected - found, found - self.expected
        assert not lost and not more, f"after {step}: lost {dict(lost)}, too many {dict(more)}"
        apart, claimed = (self.server.ask("EVAL", keys, 0) for keys in (KEYS_APART, FIELDS_CLAIMED))
        assert isinstance(apart, list) and isinstance(claimed, list)
        assert {*apart} <= {*claimed}, f"after {step}: nobody will ever remove {apart}"

    # -- what others do to Redis -----------------------------------------------------------------

    async def junk_ready(self, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 4)):
            self.push(chance.choice([QUEUE, OTHER, f"{QUEUE}\x06\x163"]), self.hostile(chance))

    async def junk_delayed(self, chance: random.Random) -> None:
        queue = chance.choice([QUEUE, OTHER])
        member = chance.choice(MEMBERS).replace("{list}", queue).encode("latin-1")
        if self.kind_of(f"umbel.delayed.{queue}") in ("none", "zset"):
            member = member.replace(b"{envelope}", self.hostile(chance))
            self.server.ask("ZADD", f"umbel.delayed.{queue}", chance.choice(SCORES), member)

    async def junk_claimed(self, chance: random.Random) -> None:
        owner = chance.choice([OWNER, PEER, "dead@there.9"])
        field = chance.choice(FIELDS).replace("{list}", f"n.{chance.randint(0, 99):x}:1:{QUEUE}")
        if self.server.ask("HEXISTS", f"umbel.inflight.{owner}", field) == 0:
            self.server.ask("HSET", f"umbel.inflight.{owner}", field, self.hostile(chance))
            self.server.ask("ZADD", "umbel.owners", "NX", "0", owner)

    async def junk_handed(self, chance: random.Random) -> None:
        owner = chance.choice([OWNER, PEER])
        self.server.ask(
            "HSET", "umbel.handing", owner, chance.choice([QUEUE, f"umbel.handed.{owner}", OTHER])
        )
        self.server.ask("LPUSH", f"umbel.handed.{owner}", self.hostile(chance))

    async def break_a_key(self, chance: random.Random) -> None:
        key = chance.choice(BREAKABLE)
        if self.kind_of(key) not in ("none", "string"):
            self.server.ask("RENAME", key, f"aside.{self.made}.{chance.random()}")
        self.server.ask("SET", key, "not ours")

    async def garble_a_text(self, chance: random.Random) -> None:
        key = chance.choice([*TEXTS, "umbel.generations"])
        if key in TEXTS:
            self.server.ask("SET", key, TEXTS[key])
        else:
            self.server.ask("HSET", key, OWNER, "newest")

    async def mend(self, chance: random.Random) -> None:
        for key in BREAKABLE:
            if self.kind_of(key) == "string":
                self.server.ask("DEL", key)

    async def end_leases(self, chance: random.Random) -> None:
        for owner in (OWNER, PEER):
            self.server.ask("ZADD", "umbel.owners", "XX", "0", owner)
        self.server.ask("DEL", "umbel.grace")

    # -- what workers do -------------------------------------------------------------------------

    async def publish(self, chance: random.Random) -> None:
        before = self.expected.copy()
        late = chance.choice([0.0, 0.0, FAR, 1.0])
        batch = [
            self.message(chance.choice([QUEUE, OTHER]), late, chance.choice([0, 0, 3]))
            for _ in range(chance.randint(1, 5))
        ]
        try:
            await self.broker.publish(batch)
        except BrokerError:
            self.expected = before  # all of it, or nothing

    async def claim(self, chance: random.Random) -> None:
        """As of small messages, or as of large ones, which lie apart."""
        owner = chance.choice([OWNER, PEER])
        self.claims._large.is_wanted = chance.random() < 0.5
        claim = await self.broker.claim(owner, [QUEUE, OTHER], chance.randint(1, 12))
        self.held[owner] += claim.deliveries

    async def hand_over(self, chance: random.Random) -> None:
        """What the server does for an idle worker, and the adoption of it."""
        owner = chance.choice([OWNER, PEER])
        epoch = self.server.ask("HGET", f"umbel.inflight.{owner}", "epoch")
        if epoch is None or self.kind_of(QUEUE) != "list":
            return
        self.server.ask("HSET", "umbel.handing", owner, QUEUE)
        envelope = self.server.ask("LMOVE", QUEUE, f"umbel.handed.{owner}", "RIGHT", "LEFT")
        assert isinstance(envelope, bytes)
        field = f"n.{chance.randint(1000, 9999):x}:1:{QUEUE}"
        given = chance.choice([epoch, b"another epoch"])
        known_by = (len(envelope), envelope[-20:])
        await self.link.run(script("adopt"), owner, given, field, *known_by)

    async def settle(self, chance: random.Random) -> None:
        owner = chance.choice([OWNER, PEER])
        some = [self.held[owner].pop() for _ in range(min(len(self.held[owner]), chance.randint(1, 6)))]
        follow_ups: Counter[int] = Counter()
        verdicts: list[Verdict] = []
        for one in some:
            made = [self.message(chance.choice([QUEUE, OTHER]), chance.choice([0.0, FAR])) for _ in "ab"]
            for follow_up in made:
                follow_ups[token_of(follow_up.message)] = 1
            choices: list[Verdict] = [
                Ack(one.tag, [result(f"r{self.made}")], made),
                Bury(one.tag, "a reason", charged=chance.random() < 0.5, follow_ups=made),
                Return(one.tag, charged=chance.choice([-1, 0, 1]), ran=chance.random() < 0.5),
                Return(one.tag, not_before=FAR),
                Started(one.tag),
            ]
            verdicts.append(chance.choice(choices))
        settled = await self.broker.settle(verdicts)
        assert settled.applied + len(settled.conflicts) == len(verdicts)
        for one, verdict in zip(some, verdicts, strict=True):
            stands = verdict.tag not in settled.conflicts
            if isinstance(verdict, Started):
                self.held[owner] += [one] if stands else []
            if isinstance(verdict, Ack) and stands:
                self.expected[token_of(one.message)] -= 1
            if isinstance(verdict, Ack | Bury) and stands:
                follow_ups -= Counter(token_of(sent.message) for sent in verdict.follow_ups)
        self.expected -= follow_ups  # of those never sent
        for refused in settled.refused:
            is_sent = isinstance(refused.part, Outgoing) and b'"t"' in refused.part.message.headers
            held = {token_of(one.message) for one in some}
            if is_sent and "cannot be put among" in refused.reason:
                assert isinstance(refused.part, Outgoing)
                token = token_of(refused.part.message)
                self.expected[token] -= token not in held  # nobody takes it, and that is said

    async def permit(self, chance: random.Random) -> None:
        """Some may start, some wait for a limit, and some wait no more."""
        owner = chance.choice([OWNER, PEER])
        terms = chance.choice([Concurrency(1).terms, Concurrency(3).terms, Rate("1/h").terms])
        asked = [
            Permit(
                one.tag, f"id{token_of(one.message)}", chance.choice(BUCKETS), terms, chance.random() < 0.1
            )
            for one in self.held[owner]
        ]
        refused = await self.broker.permit(asked)
        self.held[owner] = [one for one in self.held[owner] if refused.get(one.tag) != ""]

    async def junk_waiting(self, chance: random.Random) -> None:
        bucket = chance.choice(BUCKETS)
        if self.kind_of(f"umbel.waiting.{bucket}") in ("none", "list"):
            entry = chance.choice(["", "3:", "99:", "1:x"]).encode() + self.hostile(chance)
            self.server.ask("LPUSH", f"umbel.waiting.{bucket}", entry)

    async def abandon(self, chance: random.Random) -> None:
        owner = chance.choice([OWNER, PEER])
        tickets = {str(one.tag).partition(":")[0] for one in self.held[owner]}
        self.held[owner].clear()
        await self.link.run(script("abandon"), owner, self.link.generation, "none", *tickets)

    async def forget(self, chance: random.Random) -> None:
        owner = chance.choice([OWNER, PEER])
        self.held[owner].clear()
        await self.broker.forget_owner(owner)  # and unpark, if it was the last

    async def reap(self, chance: random.Random) -> None:
        await self.broker.return_lost()

    async def renew(self, chance: random.Random) -> None:
        await self.broker.renew(chance.choice([OWNER, PEER]))

    async def look(self, chance: random.Random) -> None:
        await self.broker.queues()
        await self.broker.wait_ready([QUEUE], 0.0)

    async def pause(self, chance: random.Random) -> None:
        await self.broker.pause(chance.choice([QUEUE, OTHER]), Pause(0.0))

    async def resume(self, chance: random.Random) -> None:
        await self.broker.resume(chance.choice([QUEUE, OTHER]))

    async def move(self, chance: random.Random) -> None:
        source, target = chance.choice([(QUEUE, OTHER), (OTHER, QUEUE), (QUEUE, f"{QUEUE}\x06\x163")])
        await self.broker.move(source, target, chance.randint(1, 12))

    async def purge(self, chance: random.Random) -> None:
        """All that waits in one queue goes, and nothing else, whether or not it is looked into."""
        queue = chance.choice([QUEUE, OTHER])
        if chance.random() < 0.5:
            self.server.ask("SET", "umbel.holding", "", "PX", 60_000)
        before = tokens_in(self.server)
        removed = await self.broker.purge(queue)
        gone = before - tokens_in(self.server)
        assert removed >= gone.total()  # one without a token may be among them
        self.expected -= gone

    async def requeue(self, chance: random.Random) -> None:
        letters = await self.broker.dead_letters()
        await self.broker.requeue_dead([one.letter_id for one in letters])

    # -- the parts of it -------------------------------------------------------------------------

    def push(self, key: str, envelope: bytes) -> None:
        if self.kind_of(key) in ("none", "list"):
            self.server.ask("LPUSH", key, envelope)
        else:
            self.expected[token_in(envelope)] -= 1

    def kind_of(self, key: str) -> str:
        kind = self.server.ask("TYPE", key)
        return kind.decode() if isinstance(kind, bytes) else str(kind)


STEPS: dict[str, Callable[[World, random.Random], Any]] = {
    step.__name__: step
    for step in (
        World.junk_ready,
        World.junk_delayed,
        World.junk_claimed,
        World.junk_handed,
        World.break_a_key,
        World.garble_a_text,
        World.mend,
        World.end_leases,
        World.publish,
        World.claim,
        World.hand_over,
        World.settle,
        World.permit,
        World.junk_waiting,
        World.abandon,
        World.forget,
        World.reap,
        World.renew,
        World.look,
        World.requeue,
        World.purge,
        World.pause,
        World.resume,
        World.move,
    )
}
OFTEN = ["publish", "claim", "claim", "permit", "settle", "settle", "reap", "junk_ready"]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([*STEPS, *OFTEN]), st.integers(0, 2**32 - 1)), min_size=8, max_size=40
    )
)
def test_whatever_lies_in_redis_every_message_is_in_one_place(
    redis_server: RedisServer, on_redis: BrokerUnderTest, steps: list[tuple[str, int]]
) -> None:
    async def scenario() -> None:
        redis_server.ask("FLUSHALL")
        async with on_redis.open(lease_s=LEASE_S) as broker:
            world = World(redis_server, broker)
            for name, seed in steps:
                try:
                    await STEPS[name](world, random.Random(seed))
                except BrokerError:
                    assert name not in ("claim", "settle", "reap"), f"{name} failed for one bad key"
                world.check(name)

    run(scenario())
