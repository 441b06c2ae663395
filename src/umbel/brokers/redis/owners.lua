-- The leases of owners. ARGV: verb, prefix, lease in seconds, owner, renewals that the owner knows of
--   renew   1 if the lease stood (an owner that renews late, before others noticed, keeps it), else 0;
--           how many renewals that makes; 1 if the data was replaced since the last one; 1 if the lease had ended
--           since the renewal that the owner knows of, also when the reply to another one in between was lost; now
--   check   1 if the data was replaced since the last renewal
--   reap    return what owners hold whose lease has ended, marked as redelivered: how many
--   forget  the same for one owner, at once
--   unhand  what the server handed to an owner that does not claim it goes back: how many
--   unpark  if no owner is left, some of what waits until it is due goes back into the lists, as clients
--           send it, where Celery finds it and so does the next worker of ours: how many
-- The reaper also makes ready what is due in queues that no worker of ours consumes.

local UNPARKED_MAX = 1000
-- A connection of an owner that was given up may stay blocked, and be handed something, for less than this.
local BLOCKED_MAX_S = 60
local LOST_KEPT_S, LOST_SWEPT_MAX = 7 * 86400, 1000
local CHUNK = 1000 -- Lua hands over only so many arguments at once
-- A lease that ends adds so much to the count of its renewals.
local LEASE_END = 2 ^ 32

local prefix, lease, owner = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local owners = prefix .. 'umbel.owners'
local now = server_time()

-- Data that knows of fewer renewals than the owner is other data or older, unless a worker of a version that
-- forgot them with the lease has left a note.
local function is_replaced(renewals)
  return renewals < tonumber(ARGV[5]) and not try('ZSCORE', prefix .. 'umbel.lost', owner)
end

-- What neither its list nor the dead letters take stays, and the owner with it, so that it is tried again.
local function forget(name)
  local inflight = prefix .. 'umbel.inflight.' .. name
  local unhanded, left_handed = unhand(prefix, name, true, now)
  local count, left = put_back(prefix, inflight, try('HKEYS', inflight) or {}, true, now)
  try('HDEL', inflight, 'epoch') -- the last field: the hash is gone with it
  if left + left_handed > 0 then
    redis.call('ZADD', owners, string.format('%.6f', now + lease), name)
  else
    redis.call('ZREM', owners, name)
  end
  return unhanded + count
end

if ARGV[1] == 'forget' then
  need('zset', 'ZCARD', owners)
  even_when_full(prefix)
  try('HDEL', prefix .. 'umbel.generations', owner)
  try('HDEL', prefix .. 'umbel.renewals', owner)
  local unrun = unhand(prefix, owner, false, now)
  return unrun + forget(owner)
end

if ARGV[1] == 'unhand' then
  even_when_full(prefix)
  return (unhand(prefix, owner, false, now))
end
if ARGV[1] == 'unpark' then
  local left = UNPARKED_MAX
  even_when_full(prefix)
  if need('zset', 'ZCOUNT', owners, string.format('(%.6f', now), '+inf') > 0 then
    return 0
  end
  for _, queue in ipairs(try('SMEMBERS', prefix .. 'umbel.queues') or {}) do
    left = left - unpark(prefix, queue, left, now)
    if left == 0 then
      break
    end
  end
  return UNPARKED_MAX - left
end

if ARGV[1] == 'check' then
  return is_replaced(tonumber(try('HGET', prefix .. 'umbel.renewals', owner) or 0) or 0) and 1 or 0
end

if ARGV[1] == 'renew' then
  even_when_full(prefix)
  note_contact(prefix, now, lease)
  local stood = 1 - need('zset', 'ZADD', owners, string.format('%.6f', now + lease), owner)
  if stood == 0 then
    -- The store is at least as old as the first worker's lease: an election asked for since then is not
    -- taken for one that an emptied store has forgotten.
    try('HSETNX', prefix .. '{coord}:meta', 'born', string.format('%.6f', now))
  end
  local count = try('HINCRBY', prefix .. 'umbel.renewals', owner, 1) or 0
  local before = math.max(0, count - 1)
  local replaced = is_replaced(before)
  local lost = math.floor(before / LEASE_END) > math.floor(tonumber(ARGV[5]) / LEASE_END)
  if stood == 0 or lost or before < tonumber(ARGV[5]) then
    lost = try('ZREM', prefix .. 'umbel.lost', owner) == 1 or lost
  end
  return {stood, count, replaced and 1 or 0, lost and 1 or 0, string.format('%.6f', now)}
end

-- What follows is done for all, by any worker: what it writes it writes rarely, and reads at each call.
local ended = need('zset', 'ZRANGE', owners, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, 100)
local is_first = true
local function before_writing()
  if is_first then
    even_when_full(prefix)
  end
  is_first = false
end

release_all(prefix, now, before_writing)

-- The owners that are handed messages and have no lease: maybe given up before the server handed them something.
local handing, given_up = prefix .. 'umbel.handing', prefix .. 'umbel.handing.given_up'
local function gone_ones()
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

local gone = gone_ones()
if #ended + #gone == 0 then
  return 0
end
before_writing()
note_contact(prefix, now, lease)
if redis.call('EXISTS', prefix .. 'umbel.grace') == 1 then
  return 0
end
local count = 0
for _, name in ipairs(gone) do
  count = count + forget(name)
  try('ZADD', given_up, 'NX', string.format('%.6f', now), name)
end
for _, name in ipairs(try('ZRANGE', given_up, '-inf', string.format('%.6f', now - BLOCKED_MAX_S), 'BYSCORE') or {}) do
  if not redis.call('ZSCORE', owners, name) then
    try('HDEL', handing, name)
  end
  redis.call('ZREM', given_up, name)
end
for _, name in ipairs(ended) do
  count = count + forget(name)
  try('ZREM', given_up, name) -- of an earlier time
  try('HINCRBY', prefix .. 'umbel.renewals', name, string.format('%.0f', LEASE_END))
  try('ZADD', prefix .. 'umbel.lost', string.format('%.6f', now), name)
end
local kept_from = string.format('%.6f', now - LOST_KEPT_S)
for _, name in ipairs(try('ZRANGE', prefix .. 'umbel.lost', '-inf', kept_from, 'BYSCORE', 'LIMIT', 0, LOST_SWEPT_MAX) or {}) do
  try('HDEL', prefix .. 'umbel.renewals', name)
  redis.call('ZREM', prefix .. 'umbel.lost', name)
end
return count
