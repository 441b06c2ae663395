"""Recorded: who came and went, and who was elected, read from the lake's tables for the time slider.

Sessions of nodes say who came, left and went silent. What nodes said of one another (suspicions, losses) and
of leases is in the timeline, elections have a table of their own. The answer has the shape of what the
dashboard hears itself, so one replay shows both. Before it stand the last changes of the nodes that
were there and of the leases that were held when the time began.

At most CHANGES_MAX changes are read, the newest; `since` says from when on none is missing. Times are those
of the nodes' clocks. A suspicion ends with the next heartbeat that was recorded: nobody announces that. A
loss that was told of a node that was heard for longer is a suspicion.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import msgspec

from umbel.history.query import Tables
from umbel.monitor.elections import node_of
from umbel.monitor.happenings import STATES, elected, lease_changed, version_changed
from umbel.monitor.shapes import Happening

CHANGES_MAX = 5000
STANDING_MAX = 5000
KEPT_S = 60.0
KEPT_MAX = 8
WENT_ON_S = 10  # after others held it for lost: they were wrong
GONE = ("lost", "left")


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the tables know of a time: oldest first, and complete from `since` to `known_until`."""

    happenings: list[Happening]
    since: float
    known_from: float | None
    known_until: float | None
    build: int
    built_at: str
    more: bool = False


class Recollection:
    """What was read lately: who drags the slider asks for the same time again and again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[float, float], tuple[float, Recorded]] = OrderedDict()
        self._reading = asyncio.Lock()  # who asks meanwhile gets the same answer

    async def recall(self, since: float, until: float, read: Callable[[], Awaitable[Recorded]]) -> Recorded:
        found = self._known(since, until)
        if found is not None:
            return found
        async with self._reading:
            found = self._known(since, until)
            if found is None:
                found = await read()
                self._kept[since, until] = monotonic(), found
                self._kept.move_to_end((since, until))
                if len(self._kept) > KEPT_MAX:
                    self._kept.popitem(last=False)
            return found

    def _known(self, since: float, until: float) -> Recorded | None:
        read_at, found = self._kept.get((since, until), (0.0, None))
        return found if monotonic() - read_at <= KEPT_S else None


def recorded(tables: Tables, since: float, until: float) -> Recorded:
    [known] = tables.rows(_KNOWN)
    rows = tables.rows(_BETWEEN, {"since": since, "until": until, "most": CHANGES_MAX + 1})
    more = len(rows) > CHANGES_MAX
    if more:
        rows.pop()
        since = rows[-1]["told_at"]
    standing = tables.rows(_STANDING, {"since": since, "most": STANDING_MAX})
    told = [one for row in (*standing, *rows) if (one := _happening(row)) is not None]
    told += _cleared(tables, told, until)
    return Recorded(
        happenings=changes_of(told),
        since=since,
        known_from=known["first"],
        known_until=known["last"],
        build=tables.build.number,
        built_at=str(tables.build.facts.get("built_at", "")),
        more=more,
    )


def changes_of(told: Iterable[Happening]) -> list[Happening]:
    """In their order, without what changed nothing: several nodes tell of one loss, and some say why."""
    kept: list[Happening] = []
    places: dict[str, int] = {}  # of the last change of each node
    for one in sorted(told, key=lambda one: (one.at, one.kind not in STATES, one.subject)):
        if one.kind in STATES:
            place = places.get(one.subject)
            before = None if place is None else kept[place]
            if not _is_change(one.kind, None if before is None else STATES[before.kind]):
                if place is not None and before is not None and one.kind == before.kind and not before.text:
                    kept[place] = msgspec.structs.replace(before, text=one.text)
                continue
            places[one.subject] = len(kept)
        kept.append(one)
    return kept


def _is_change(kind: str, before: str | None) -> bool:
    match kind:
        case "alive":
            return before == "suspect"
        case "suspect":
            return before in (None, "alive")
        case "lost" | "left":
            return before not in GONE
        case _:
            return True  # it came: a process that begins is told, also where the one before it was not missed


def _happening(row: dict[str, Any]) -> Happening | None:
    at, kind, subject, text = row["told_at"], row["kind"], row["subject"], row["text"] or ""
    node, term = node_of(row["node"] or ""), row["term"] or 0
    match kind:
        case "lease":
            return lease_changed(subject, node, term, at)
        case "elected":
            return elected(subject, text, node, term, at)
        case "version":
            return version_changed(subject, text, row["node"], at)
        case "suspect" | "lost" if row["node"]:
            found = f"found by {row['node']}"
            return Happening(at=at, kind=kind, subject=subject, text=text or found, node=subject)
        case _:
            return Happening(at=at, kind=kind, subject=subject, text=text, node=subject)


def _cleared(tables: Tables, told: Sequence[Happening], until: float) -> list[Happening]:
    """The first heartbeat after each suspicion."""
    accused = [one for one in told if one.kind == "suspect"]
    if not accused:
        return []
    values = {
        "nodes": [one.subject for one in accused],
        "times": [one.at for one in accused],
        "since": min(one.at for one in accused),
        "until": until,
    }
    return [
        Happening(at=row["told_at"], kind="alive", subject=row["node"], node=row["node"])
        for row in tables.rows(_HEARD_AFTER, values)
    ]


# What a table has of other programs is text of any length, and JSON that may be none.
_CHANGES = f"""
with session as (
    select hostname, online_at, last_at, ended_at, ending, sw_ver,
        lag(sw_ver) over node as sw_ver_before, row_number() over node as number
    from workers window node as (partition by hostname order by online_at, pid)
), said as (
    select epoch(timestamp) as told_at, type, hostname, case when json_valid(extra) then extra end as extra
    from timeline where type in ('worker-suspect', 'worker-lost', 'worker-leader')
), change as (
    select epoch(online_at) as told_at, case when number = 1 then 'joined' else 'returned' end as kind,
        hostname as subject, '' as text, '' as node, 0 as term
    from session
    union all
    select epoch(ended_at), case ending when 'offline' then 'left' else 'lost' end, hostname, '', '', 0
    from session one where ended_at is not null and not exists (
        select 1 from session other where other.hostname = one.hostname
            and other.online_at <= one.ended_at
            and (other.ended_at is null or other.ended_at > one.ended_at))
    union all
    select epoch(online_at), 'version', hostname, left(sw_ver_before, 100), left(sw_ver, 100), 0
    from session where sw_ver <> sw_ver_before
    union all
    select epoch(last_at), 'elected', election_id, left(topic, 200), left(winner, 300), coalesce(term, 0)
    from elections where winner is not null
    union all
    select told_at, case when type = 'worker-lost' and exists (
            select 1 from session where session.hostname = extra->>'$.subject'
                and epoch(online_at) <= told_at and epoch(last_at) > told_at + {WENT_ON_S})
            then 'suspect' else substr(type, 8) end,
        extra->>'$.subject', left(extra->>'$.reason', 200), said.hostname, 0
    from said where type <> 'worker-leader'
    union all
    select told_at, 'lease', extra->>'$.lease', '',
        case when extra->>'$.phase' = 'acquired' then left(extra->>'$.leader', 300) else '' end,
        coalesce(try_cast(extra->>'$.term' as bigint), 0)
    from said where type = 'worker-leader'
)"""
_FIELDS = "select told_at, kind, left(subject, 300) as subject, text, node, term from change"
_BETWEEN = f"""{_CHANGES}
{_FIELDS} where told_at >= $since and told_at < $until and subject <> ''
order by told_at desc, subject limit $most"""
_STANDING = f"""{_CHANGES}, last as (
    select * from change where told_at < $since and subject <> '' and kind not in ('version', 'elected')
    qualify row_number() over (partition by kind = 'lease', subject order by told_at desc) = 1)
{_FIELDS.replace("from change", "from last")}
where kind not in ('lost', 'left') and (kind <> 'lease' or node <> '') order by told_at desc limit $most"""
_KNOWN = """
select min(first) as first, max(last) as last from (
    select epoch(min(online_at)) as first, epoch(max(last_at)) as last from workers
    union all select epoch(min(first_at)), epoch(max(last_at)) from elections)"""
_HEARD_AFTER = """
with accused as (select unnest($nodes) as node, unnest($times) as told_at),
beat as (
    select hostname as node, epoch(timestamp) as told_at from timeline
    where type in ('worker-online', 'worker-heartbeat') and hostname in (select node from accused)
        and epoch(timestamp) between $since and $until)
select distinct beat.node, beat.told_at from accused asof join beat
    on accused.node = beat.node and accused.told_at < beat.told_at"""
