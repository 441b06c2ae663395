-- The durable event log: a stream whose ids are "<offset>-0". An entry holds one event or several ("n");
-- offsets count events, and an entry has that of its last one.
-- ARGV: "append", prefix, most events kept, then key, number of events, body...   Reply: entries kept.
--       "register", prefix, name      Reply: the offset that the recorder has acknowledged.
--       "acknowledge", prefix, name, offset     What every recorder has acknowledged goes: nobody can read it.
--       "sweep", prefix, older than (seconds), most at once     Reply: how many went.
-- Nothing is kept while no recorder is registered. What goes at the limit although a recorder has not
-- acknowledged it is counted as lost.

local verb, prefix = ARGV[1], ARGV[2]
local recorders, events = prefix .. 'umbel.recorders', prefix .. 'umbel.events'
local offsets, lost = prefix .. 'umbel.events.offset', prefix .. 'umbel.events.lost'

need('hash', 'HLEN', recorders)
need('stream', 'XLEN', events)

-- Where the offset was lost, the last event has it: ids must rise.
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
  redis.call('HSETNX', recorders, ARGV[3], string.format('%d', last_offset()))
  return whole(redis.call('HGET', recorders, ARGV[3])) or 0
end

if verb == 'acknowledge' then
  local before = redis.call('HGET', recorders, ARGV[3])
  if before and (whole(before) or 0) < tonumber(ARGV[4]) then
    redis.call('HSET', recorders, ARGV[3], ARGV[4])
    drop_before(acknowledged_by_all() + 1)
  end
  return 1
end

if verb == 'sweep' then
  local keep_from, all = nil, acknowledged_by_all()
  for _, entry in ipairs(redis.call('XRANGE', events, '-', '+', 'COUNT', ARGV[4])) do
    local offset = tonumber(string.match(entry[1], '^%d+'))
    if offset > all or (tonumber(entry[2][2]) or 0) > tonumber(ARGV[3]) then
      break
    end
    keep_from = offset + 1
  end
  return keep_from and drop_before(keep_from) or 0
end

if redis.call('EXISTS', recorders) == 0 then
  return 0
end
local t = redis.call('TIME')
local now = t[1] .. '.' .. string.format('%06d', t[2])
local offset = last_offset()
for i = 4, #ARGV, 3 do
  local id = string.format('%d-0', offset + ARGV[i + 1])
  if ARGV[i + 1] == '1' then
    redis.call('XADD', events, id, 'at', now, 'key', ARGV[i], 'body', ARGV[i + 2])
  else
    redis.call('XADD', events, id, 'at', now, 'key', ARGV[i], 'body', ARGV[i + 2], 'n', ARGV[i + 1])
  end
  offset = offset + ARGV[i + 1]
end
redis.call('SET', offsets, string.format('%d', offset))
local room_from = offset - ARGV[3]
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
return (#ARGV - 3) / 3
