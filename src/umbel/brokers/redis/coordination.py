"""RedisCoordination: elections and leases as scripts, and what their replies mean.

The server decides, in `coordination.lua` and by its clock, with the rules of
`protocol/leadership/coordination.py`.

A server with replicas may fail over to a replica that has not received a grant. So each grant is followed by
`WAIT`, and a grant that no replica confirmed in time is counted as unproven. It is still valid: `WAIT` makes
its loss unlikely, not impossible. `WAIT` delays the calls after it, so this uses a separate connection.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec

from umbel.brokers.interface import Refused
from umbel.brokers.redis import queues
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import Bindings, parkable
from umbel.brokers.redis.replies import ServerRefused
from umbel.brokers.refusals import log_refused
from umbel.errors import AccessRefused, BrokerError
from umbel.protocol.leadership.coordination import (
    Busy,
    Closed,
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    ElectionState,
    Granted,
    LeaseReply,
)
from umbel.wire.message import Outgoing

REPLICAS_ASKED, REPLICA_WAIT_MS = 1, 200
LOOK_FOR_REPLICAS_EVERY_S = 60.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ElectionRequest).decode


class RedisCoordination:
    """Elections and leases on one server. `clock` is for tests: the time, as text, not that of the server."""

    def __init__(self, link: Link, keys: Keys, bindings: Bindings | None = None, *, clock: str = "") -> None:
        self._bindings = bindings or Bindings(keys)
        self._link = link
        self._keys = keys
        self.clock = clock
        self.unproven = 0
        self._has_replicas = False
        self._looked_at = float("-inf")

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Create the election, or return the record of the existing one."""
        return _record(await self._election("open", key, *_asked(request)))

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        """Ask for the right to run the request; a grant is replicated first."""
        found = await self._election("claim", key, *_asked(request), holder, repr(ttl_s))
        reply = _election_reply(found)
        if isinstance(reply, Granted):
            await self._prove()
        return reply

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        """Record that the holder has started the work."""
        return await self._proven(await self._election("start", key, holder, term))

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Extend the holder's time."""
        return await self._proven(await self._election("renew", key, holder, term))

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Close the election with its outcome."""
        return await self._proven(await self._election("finish", key, holder, term, outcome))

    async def read_election(self, key: str) -> ElectionRecord | None:
        """The record of one election, if any."""
        found = await self._election("read", key)
        return _record(found) if found else None

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Elections that some node should claim; one EXISTS if none is open."""
        if await self._link.call("EXISTS", self._keys.open_elections) == 0:
            return []
        found = await self._election("unfinished", "", limit)
        return [(found[at].decode(), _record(found[at + 1])) for at in range(0, len(found), 2)]

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        """Take the lease if it is free; a grant is replicated first."""
        reply = _lease_reply(await self._lease("acquire", name, holder, repr(ttl_s)))
        if reply.granted:
            await self._prove()
        return reply

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        """Extend the lease of this term."""
        return await self._proven(await self._lease("renew", name, holder, term, repr(ttl_s)))

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Free the lease of this term."""
        return await self._proven(await self._lease("release", name, holder, term))

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Replace the data for the next holder."""
        return await self._proven(await self._lease("update", name, holder, term, data))

    async def read_lease(self, name: str) -> LeaseReply:
        """The state of the lease."""
        return _lease_reply(await self._lease("read", name))

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Publish and store `data` in one script if the term is held; refused messages are buried."""
        routed = self._bindings.route(batch, await self._link.call_all(self._bindings.read(batch)))
        if routed.batch:
            await self._link.attempt_all(
                self._bindings.declare({outgoing.queue for outgoing in routed.batch})
            )
        args = ("keep", b"") if data is None else ("change", data)
        messages = parkable(self._keys, routed.batch, ())
        reply = await self._lease("publish", name, holder, term, *args, *messages)
        status, *reported = reply if isinstance(reply, list) else [reply]
        log_refused(
            Refused(routed.batch[place], why.decode(errors="replace"))
            for place, why in zip(reported[::2], reported[1::2], strict=True)
        )
        if status and routed.refused:
            unroutable = [Refused(batch[place], why) for place, why in routed.refused.items()]
            log_refused(unroutable)
            await queues.bury_messages(self._link, self._keys, unroutable)
        return await self._proven(status)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """(key, task id): free each key that this task holds."""
        await self._link.run(self._keys.script("unique"), "release", *chain.from_iterable(held))

    async def raise_clock(self, value: int) -> int:
        """Raise the clock mark to at least this value; returns the mark."""
        return int(await self._link.call("EVAL", _RAISE, 0, self._keys.clock, value))

    async def _election(self, verb: str, key: str, *args: Any) -> Any:
        return await self._link.run(self._keys.script("election"), self.clock, verb, key, *args)

    async def _lease(self, verb: str, name: str, *args: Any) -> Any:
        return await self._link.run(self._keys.script("lease"), self.clock, verb, name, *args)

    async def _proven(self, status: int) -> bool:
        if status:
            await self._prove()
        return bool(status)

    async def _prove(self) -> None:
        """Wait until a replica has the grant that was just made on this connection; count it if none has."""
        try:
            if not await self._replicas_are_there():
                return
            confirmed: int = await self._link.call("WAIT", REPLICAS_ASKED, REPLICA_WAIT_MS)
        except BrokerError:
            confirmed = 0
        if confirmed < REPLICAS_ASKED:
            self.unproven += 1

    async def _replicas_are_there(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_FOR_REPLICAS_EVERY_S:
            self._looked_at = now
            try:
                role = await self._link.call("ROLE")
            except (AccessRefused, ServerRefused):  # this user lacks the right to ask
                role = [b"unknown"]
            self._has_replicas = role[0] == b"master" and bool(role[2])
        return self._has_replicas


# As text: Lua's numbers print with fourteen digits.
_RAISE = """
local before = redis.call('GET', ARGV[1]) or '0'
if tonumber(ARGV[2]) <= tonumber(before) then return before end
redis.call('SET', ARGV[1], ARGV[2])
return ARGV[2]
"""


def _asked(request: ElectionRequest) -> tuple[Any, ...]:
    return (_encode(request), request.policy.value, repr(request.asked_at), repr(request.expires_s))


def _record(flat: Sequence[bytes]) -> ElectionRecord:
    fields = {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}
    return ElectionRecord(
        state=ElectionState(fields["state"].decode()),
        request=replace(_decode(fields["request"]), asked_at=float(fields["asked_at"])),
        changed_at=float(fields["changed_at"]),
        holder=fields["holder"].decode(),
        term=int(fields["term"]),
        attempt=int(fields["attempt"]),
        started=fields["started"] == b"1",
        expires_at=float(fields["expires_at"]),
        ttl_s=float(fields["ttl_s"]),
        outcome=fields["outcome"].decode(),
    )


def _election_reply(reply: Sequence[Any]) -> ElectionReply:
    kind, *parts = reply
    if kind == b"granted":
        return Granted(int(parts[0]), int(parts[1]))
    if kind == b"busy":
        return Busy(parts[0].decode(), int(parts[1]), float(parts[2]))
    state, holder, term, outcome, by_me = parts
    return Closed(
        ElectionState(state.decode()), holder.decode(), int(term), outcome.decode(), by_me=bool(by_me)
    )


def _lease_reply(reply: Sequence[Any]) -> LeaseReply:
    granted, holder, term, left_s, data = reply
    return LeaseReply(bool(granted), holder.decode(), int(term), float(left_s), data)
