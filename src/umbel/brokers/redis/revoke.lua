-- The durable record of tasks that must not start.
-- ARGV: "record", prefix, limit, then for each: name (task id NUL header), expires_at, revoke as JSON
--       "sweep", prefix, limit of how many to forget
-- Reply: how many; -1 when the record is full, and then nothing is recorded. The cursor is never
-- below the server's microseconds, so it goes on rising when the server forgets everything.

local prefix, limit = ARGV[2], tonumber(ARGV[3])
local revokes, order = prefix .. 'umbel.revokes', prefix .. 'umbel.revokes.order'
local expiry, cursors = prefix .. 'umbel.revokes.expiry', prefix .. 'umbel.revokes.cursor'
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

if ARGV[1] == 'sweep' then
  return sweep(limit)
end

local new, seen = 0, {}
for i = 4, #ARGV, 3 do
  local expires_at = tonumber(ARGV[i + 1])
  if not expires_at or expires_at ~= expires_at then
    error('REFUSED a revoke that expires at ' .. ARGV[i + 1], 0)
  end
  if not seen[ARGV[i]] and redis.call('HEXISTS', revokes, ARGV[i]) == 0 then
    new = new + 1
  end
  seen[ARGV[i]] = true
end
if redis.call('HLEN', revokes) + new > limit then
  sweep(limit)
  if redis.call('HLEN', revokes) + new > limit then
    return -1
  end
end
local cursor = math.max(tonumber(t[1]) * 1000000 + tonumber(t[2]), (whole(try('GET', cursors) or 0) or 0) + 1)
for i = 4, #ARGV, 3 do
  local before = redis.call('HGET', revokes, ARGV[i])
  if before then
    redis.call('ZREM', order, before)
  end
  redis.call('HSET', revokes, ARGV[i], ARGV[i + 2])
  redis.call('ZADD', order, string.format('%d', cursor), ARGV[i + 2])
  redis.call('ZADD', expiry, ARGV[i + 1], ARGV[i])
  redis.call('SET', cursors, string.format('%d', cursor))
  cursor = cursor + 1
end
return (#ARGV - 3) / 3
