-- Owners: the leases of workers, and what happens when a lease ends.

-- ---- script owners (with messages, holding, returning) ---------------------------------------------
-- ARGV: verb, lease in seconds, owner, renewals that the owner knows of
--   renew   1 if the lease stood (an owner that renews late, before others noticed, keeps it), else 0; how many renewals
--           that makes; 1 if the data was replaced since the last one; 1 if the lease had ended since the renewal that
--           the owner knows of, also if the reply to another one in between was lost; the time
--   check   1 if the data was replaced since the last renewal
--   reap    return the messages of owners whose lease has ended, marked as redelivered: how many
--   forget  the same for one owner, at once
--   unhand  return what the server handed to an owner that does not claim it: how many
--   unpark  if no owner is left, return some delayed messages to the lists, as clients send them, where Celery and
--           the next worker of Umbel find them: how many
-- The reaper also makes ready what is due in queues that no worker of Umbel consumes.

local verb, lease, owner, known_renewals = unpack(ARGV)
local UNPARKED_MAX = 1000
-- A connection of an owner that was given up may stay blocked, and be handed a message, for less than this.
local BLOCKED_MAX_S = 60
local LOST_KEPT_S, LOST_SWEPT_MAX = 7 * 86400, 1000
local CHUNK = 1000 -- Lua passes only so many arguments at once
-- A lease that ends adds this to the count of its renewals.
local LEASE_END = 2 ^ 32

lease, known_renewals = tonumber(lease), tonumber(known_renewals)
local owners, lost_owners = PREFIX .. 'umbel.owners', PREFIX .. 'umbel.lost'
local renewals, generations = PREFIX .. 'umbel.renewals', PREFIX .. 'umbel.generations'
local now = server_time()

-- Data with fewer renewals than the owner knows of is other data or older, unless a worker of a version that forgot
-- renewals with the lease has left a note.
local function is_replaced(count)
  return count < known_renewals and not try('ZSCORE', lost_owners, owner)
end

-- Messages that neither their list nor the dead letters take stay, and so does their owner, to be tried again.
local function forget(name)
  local inflight = PREFIX .. 'umbel.inflight.' .. name
  local unhanded, left_handed = unhand(name, true)
  local count, left = put_back(inflight, try('HKEYS', inflight) or {}, true)
  try('HDEL', inflight, 'epoch') -- if it is the last field, the hash is gone with it
  if left + left_handed > 0 then
    redis.call('ZADD', owners, instant(now + lease), name)
  else
    redis.call('ZREM', owners, name)
  end
  return unhanded + count
end

-- Return delayed messages to their lists with their time in the mark: how many, at most `limit`.
local function unpark(queue, limit)
  local delayed = PREFIX .. 'umbel.delayed.' .. queue
  local parked = try('ZRANGE', delayed, 0, limit - 1, 'WITHSCORES') or {}
  for i = 1, #parked, 2 do
    local list, envelope = parked_parts(queue, parked[i])
    local bare, mark = unmarked(envelope)
    local due = tonumber(parked[i + 1])
    mark.not_before = due >= 0 and due <= DUE_MAX_S and due or nil
    if not push_or_bury('LPUSH', list, marked(bare, mark)) then
      return (i - 1) / 2
    end
    redis.call('ZREM', delayed, parked[i])
  end
  return #parked / 2
end

if verb == 'forget' then
  need('zset', 'ZCARD', owners)
  even_when_full()
  try('HDEL', generations, owner)
  try('HDEL', renewals, owner)
  local unrun = unhand(owner, false)
  return unrun + forget(owner)
end

if verb == 'unhand' then
  even_when_full()
  return (unhand(owner, false))
end

if verb == 'unpark' then
  local left = UNPARKED_MAX
  even_when_full()
  if need('zset', 'ZCOUNT', owners, '(' .. instant(now), '+inf') > 0 then
    return 0
  end
  for _, queue in ipairs(try('SMEMBERS', PREFIX .. 'umbel.queues') or {}) do
    left = left - unpark(queue, left)
    if left == 0 then
      break
    end
  end
  return UNPARKED_MAX - left
end

if verb == 'check' then
  return is_replaced(tonumber(try('HGET', renewals, owner) or 0) or 0) and 1 or 0
end

if verb == 'renew' then
  even_when_full()
  note_contact(lease)
  local stood = 1 - need('zset', 'ZADD', owners, instant(now + lease), owner)
  if stood == 0 then
    -- The store is at least as old as the first worker's lease: so an election that was opened since then is not
    -- taken for one that an emptied store has forgotten.
    try('HSETNX', PREFIX .. '{coord}:meta', 'born', instant(now))
  end
  local count = try('HINCRBY', renewals, owner, 1) or 0
  local before = math.max(0, count - 1)
  local replaced = is_replaced(before)
  local lost = math.floor(before / LEASE_END) > math.floor(known_renewals / LEASE_END)
  if stood == 0 or lost or before < known_renewals then
    lost = try('ZREM', lost_owners, owner) == 1 or lost
  end
  return {stood, count, replaced and 1 or 0, lost and 1 or 0, instant(now)}
end

-- The reaper. Any worker does this for all: its reads run at each call, its writes rarely.
local ended = need('zset', 'ZRANGE', owners, '-inf', instant(now), 'BYSCORE', 'LIMIT', 0, 100)
local is_first = true
local function before_writing()
  if is_first then
    even_when_full()
  end
  is_first = false
end

for _, queue in ipairs(try('SMEMBERS', PREFIX .. 'umbel.queues') or {}) do
  release(queue, before_writing)
end

-- Owners that are handed messages and have no lease: they may have been given up before the server handed them one.
local handing, given_up = PREFIX .. 'umbel.handing', PREFIX .. 'umbel.handing.given_up'
local function without_lease()
  local names, gone = try('HKEYS', handing) or {}, {}
  for first = 1, #names, CHUNK do
    local last = math.min(first + CHUNK - 1, #names)
    for i, score in ipairs(redis.call('ZMSCORE', owners, unpack(names, first, last))) do
      if not score then
        gone[#gone + 1] = names[first + i - 1]
      end
    end
  end
  return gone
end

local gone = without_lease()
if #ended + #gone == 0 then
  return 0
end
before_writing()
note_contact(lease)
if redis.call('EXISTS', PREFIX .. 'umbel.grace') == 1 then
  return 0
end
local count = 0
for _, name in ipairs(gone) do
  count = count + forget(name)
  try('ZADD', given_up, 'NX', instant(now), name)
end
for _, name in ipairs(try('ZRANGE', given_up, '-inf', instant(now - BLOCKED_MAX_S), 'BYSCORE') or {}) do
  if not redis.call('ZSCORE', owners, name) then
    try('HDEL', handing, name)
  end
  redis.call('ZREM', given_up, name)
end
for _, name in ipairs(ended) do
  count = count + forget(name)
  try('ZREM', given_up, name) -- of an earlier time
  try('HINCRBY', renewals, name, string.format('%.0f', LEASE_END))
  try('ZADD', lost_owners, instant(now), name)
end
local kept_from = instant(now - LOST_KEPT_S)
for _, name in ipairs(try('ZRANGE', lost_owners, '-inf', kept_from, 'BYSCORE', 'LIMIT', 0, LOST_SWEPT_MAX) or {}) do
  try('HDEL', renewals, name)
  redis.call('ZREM', lost_owners, name)
end
return count
