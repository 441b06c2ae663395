-- What a cluster shares besides messages: replies to clients, the event log, revokes, unique tasks, used signatures.

-- ---- script askers ---------------------------------------------------------------------------------
-- Clients that wait for replies: the bindings of their reply queues, and until when each client counts as alive.
-- ARGV: verb, exchange, life in seconds, then the members of the exchange's binding set.

local verb, exchange, life_s = unpack(ARGV, 1, 3)
local FIRST_MEMBER = 4
local bindings, askers = PREFIX .. '_kombu.binding.' .. exchange, PREFIX .. 'umbel.askers.' .. exchange
local now = math.floor(server_time())
need('zset', 'ZCARD', askers)

local function remove(member)
  try('SREM', bindings, member)
  redis.call('ZREM', askers, member)
  local _, last = string.find(member, SEP .. SEP, 1, true)
  local name = last and string.sub(member, last + 1) or ''
  if string.sub(name, -#exchange - 1) == '.' .. exchange then -- others are not queues of such clients
    for _, suffix in ipairs(SUFFIXES) do
      redis.call('DEL', PREFIX .. name .. suffix)
    end
  end
end

if verb == 'sweep' then
  local over = redis.call('ZRANGEBYSCORE', askers, '-inf', now, 'LIMIT', 0, 1000)
  for _, member in ipairs(over) do
    remove(member)
  end
  return #over
end

for place = FIRST_MEMBER, #ARGV do
  if verb == 'leave' then
    remove(ARGV[place])
  else
    need('set', 'SADD', bindings, ARGV[place])
    redis.call('ZADD', askers, now + life_s, ARGV[place])
  end
end
if verb == 'enter' then
  -- How long Celery 5.7 leaves the bindings of expiring queues alone, in milliseconds.
  try('ZADD', PREFIX .. '_kombu.binding_deadlines', 'GT', now * 1000 + 3600000, exchange)
end
return #ARGV - FIRST_MEMBER + 1

-- ---- script event_log ------------------------------------------------------------------------------
-- The event log is a stream whose ids are "<offset>-0". An entry has one event or several ("n"); offsets count events,
-- and an entry has the offset of its last event.
-- ARGV: "append", most events retained, then key, number of events, body...   Reply: how many entries were stored.
--       "register", name              Reply: the offset that the recorder has acknowledged.
--       "acknowledge", name, offset   What every recorder has acknowledged is removed: no recorder can read it.
--       "sweep", older than (seconds), most at once     Reply: how many were removed.
-- Nothing is stored while no recorder is registered. Events that are removed at the limit although a recorder has not
-- acknowledged them are counted as lost.

local verb = ARGV[1]
local recorders, events = PREFIX .. 'umbel.recorders', PREFIX .. 'umbel.events'
local offsets, lost = PREFIX .. 'umbel.events.offset', PREFIX .. 'umbel.events.lost'

need('hash', 'HLEN', recorders)
need('stream', 'XLEN', events)

-- If the offset was lost, the last event has it: ids must rise.
local function last_offset()
  local offset = whole(try('GET', offsets) or nil)
  if not offset then
    local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
    offset = last and whole(string.match(last[1], '^%d+'))
  end
  return offset or 0
end

local function acknowledged_by_all()
  local lowest = last_offset()
  for _, offset in ipairs(redis.call('HVALS', recorders)) do
    lowest = math.min(lowest, whole(offset) or 0)
  end
  return lowest
end

local function drop_before(offset)
  return redis.call('XTRIM', events, 'MINID', string.format('%d-0', offset))
end

if verb == 'register' then
  local name = ARGV[2]
  redis.call('HSETNX', recorders, name, string.format('%d', last_offset()))
  return whole(redis.call('HGET', recorders, name)) or 0
end

if verb == 'acknowledge' then
  local name, offset = ARGV[2], ARGV[3]
  local before = redis.call('HGET', recorders, name)
  if before and (whole(before) or 0) < tonumber(offset) then
    redis.call('HSET', recorders, name, offset)
    drop_before(acknowledged_by_all() + 1)
  end
  return 1
end

if verb == 'sweep' then
  local older_than, most = tonumber(ARGV[2]), ARGV[3]
  local keep_from, all = nil, acknowledged_by_all()
  for _, entry in ipairs(redis.call('XRANGE', events, '-', '+', 'COUNT', most)) do
    local offset = tonumber(string.match(entry[1], '^%d+'))
    if offset > all or (tonumber(entry[2][2]) or 0) > older_than then
      break
    end
    keep_from = offset + 1
  end
  return keep_from and drop_before(keep_from) or 0
end

if redis.call('EXISTS', recorders) == 0 then
  return 0
end
local now, offset, most = instant(server_time()), last_offset(), ARGV[2]
for i = 3, #ARGV, 3 do
  local key, count, body = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  offset = offset + count
  local id = string.format('%d-0', offset)
  if count == '1' then
    redis.call('XADD', events, id, 'at', now, 'key', key, 'body', body)
  else
    redis.call('XADD', events, id, 'at', now, 'key', key, 'body', body, 'n', count)
  end
end
redis.call('SET', offsets, string.format('%d', offset))
local room_from = offset - most
if room_from > 0 then
  local last = redis.call('XREVRANGE', events, string.format('%d-0', room_from), '-', 'COUNT', 1)[1]
  if last then
    local first = redis.call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
    local gone = tonumber(string.match(first[1], '^%d+')) - (tonumber(first[2][8]) or 1)
    local last_dropped = tonumber(string.match(last[1], '^%d+'))
    local unread = last_dropped - math.max(gone, acknowledged_by_all())
    drop_before(last_dropped + 1)
    if unread > 0 then
      try('INCRBY', lost, unread)
    end
  end
end
return (#ARGV - 2) / 3

-- ---- script revoke ---------------------------------------------------------------------------------
-- The durable record of tasks that must not start.
-- ARGV: "record", limit, then for each: name (task id NUL header), expires_at, revoke as JSON
--       "sweep", how many to forget at most
-- Reply: how many; -1 if the record is full, and then nothing is recorded. The cursor is never below the server's
-- microseconds, so it rises even if the server forgets everything.

local verb, limit = ARGV[1], tonumber(ARGV[2])
local FIRST = 3
local revokes, order = PREFIX .. 'umbel.revokes', PREFIX .. 'umbel.revokes.order'
local expiry, cursors = PREFIX .. 'umbel.revokes.expiry', PREFIX .. 'umbel.revokes.cursor'
local t = redis.call('TIME')
need('hash', 'HLEN', revokes)
need('zset', 'ZCARD', order)
need('zset', 'ZCARD', expiry)

local function sweep(most)
  local old = redis.call('ZRANGE', expiry, '-inf', t[1], 'BYSCORE', 'LIMIT', 0, most)
  for _, name in ipairs(old) do
    redis.call('ZREM', order, redis.call('HGET', revokes, name) or '')
    redis.call('HDEL', revokes, name)
    redis.call('ZREM', expiry, name)
  end
  return #old
end

if verb == 'sweep' then
  return sweep(limit)
end

local new, seen = 0, {}
for i = FIRST, #ARGV, 3 do
  local name, expires_at = ARGV[i], tonumber(ARGV[i + 1])
  if not expires_at or expires_at ~= expires_at then
    error('REFUSED a revoke that expires at ' .. ARGV[i + 1], 0)
  end
  if not seen[name] and redis.call('HEXISTS', revokes, name) == 0 then
    new = new + 1
  end
  seen[name] = true
end
if redis.call('HLEN', revokes) + new > limit then
  sweep(limit)
  if redis.call('HLEN', revokes) + new > limit then
    return -1
  end
end
local cursor = math.max(tonumber(t[1]) * 1000000 + tonumber(t[2]), (whole(try('GET', cursors) or 0) or 0) + 1)
for i = FIRST, #ARGV, 3 do
  local name, expires_at, revoke = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local before = redis.call('HGET', revokes, name)
  if before then
    redis.call('ZREM', order, before)
  end
  redis.call('HSET', revokes, name, revoke)
  redis.call('ZADD', order, string.format('%d', cursor), revoke)
  redis.call('ZADD', expiry, expires_at, name)
  redis.call('SET', cursors, string.format('%d', cursor))
  cursor = cursor + 1
end
return (#ARGV - FIRST + 1) / 3

-- ---- script spend ----------------------------------------------------------------------------------
-- Use signatures. ARGV: the cluster's id ("": it is not compared), then for each: mark, owner, field of the claim,
-- milliseconds to remember it.
-- Reply: the places, from 0, of copies: the claim that used the signature stands, or has ended its message. A claim
-- that neither stands nor has ended was returned, or its owner is gone: then the signature may be used again.
-- Instead a text: the id that is stored. Without the right id the record of signatures may be lost, too, and nothing
-- is used.

local cluster, copies = ARGV[1], {}
if cluster ~= '' then
  local stored = need('string', 'GET', PREFIX .. 'umbel.cluster') or ''
  local found = string.match(stored, '^%S+ (.*)$') or ''
  if found ~= cluster then
    return found
  end
end
even_when_full() -- otherwise nothing could run, and so nothing would free memory
for i = 2, #ARGV, 4 do
  local mark, owner, field, remembered_ms = unpack(ARGV, i, i + 3)
  local key = PREFIX .. 'umbel.signature.' .. mark
  local user = need('string', 'GET', key)
  local is_free = not user
  if user then -- an empty text says that its message has ended: then there is no holder
    local holder, held = string.match(user, '^(.-)\n(.*)$')
    is_free = holder and redis.call('HEXISTS', PREFIX .. 'umbel.inflight.' .. holder, held) == 0
  end
  if is_free then
    redis.call('SET', key, owner .. '\n' .. field, 'PX', remembered_ms)
  else
    copies[#copies + 1] = (i - 2) / 4
  end
end
return copies

-- ---- script unique (with holds) --------------------------------------------------------------------
-- The keys of unique tasks. ARGV: verb, then
--   hold     key, task id, milliseconds   Reply: the task that holds it now
--   release  key, task id, ...            Reply: how many were released

local uniques = PREFIX .. 'umbel.unique.'

if ARGV[1] == 'hold' then
  local key, task, ttl_ms = uniques .. ARGV[2], ARGV[3], ARGV[4]
  local holder = need('string', 'GET', key)
  if holder then
    return holder
  end
  note_holding(tonumber(ttl_ms))
  redis.call('SET', key, task, 'PX', ttl_ms)
  return task
end

local released = 0
for i = 2, #ARGV, 2 do
  if try('GET', uniques .. ARGV[i]) == ARGV[i + 1] then
    released = released + redis.call('DEL', uniques .. ARGV[i])
  end
end
return released
