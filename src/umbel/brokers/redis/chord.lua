-- Chords under Celery's keys (wire 6.2): which parts have ended, and whether the body was sent.
-- ARGV: verb, base key (".s" size, ".j" parts, ".t" extra parts, ".d" counted, ".c" claim), ...
--   start  base size ttl_s
--   add    base ttl_s place mark part      -> all parts in order when none is missing, else nothing
--   claim  base by ttl_s                   -> 1 if `by` may send the body, else 0
--   end    base done_s (list envelope)...  -> 1 if this call ended it, else 0

local verb, base = ARGV[1], ARGV[2]
local size, parts, extra = base .. '.s', base .. '.j', base .. '.t'
local counted, claimed = base .. '.d', base .. '.c'
local is_done = redis.call('GET', claimed) == 'done'

if verb == 'start' then
  -- A sender that was redelivered starts it again: it goes on with the parts it has.
  if not is_done then
    redis.call('SET', size, ARGV[3], 'EX', ARGV[4])
  end
  return 1
elseif verb == 'add' then
  if is_done then
    return false
  end
  if redis.call('SADD', counted, ARGV[5]) == 1 then
    redis.call('ZADD', parts, ARGV[4], ARGV[6])
  end
  for _, key in ipairs({ size, parts, extra, counted }) do
    redis.call('EXPIRE', key, ARGV[3])
  end
  local wanted = redis.call('GET', size)
  if not wanted then
    return false
  end
  wanted = tonumber(wanted) + tonumber(redis.call('GET', extra) or 0)
  if redis.call('ZCARD', parts) < wanted then
    return false
  end
  return redis.call('ZRANGE', parts, 0, -1)
elseif verb == 'claim' then
  if redis.call('SET', claimed, ARGV[3], 'NX', 'EX', ARGV[4]) then
    return 1
  end
  return redis.call('GET', claimed) == ARGV[3] and 1 or 0
elseif verb == 'end' then
  if is_done then
    return 0
  end
  for i = 4, #ARGV, 2 do
    redis.call('LPUSH', ARGV[i], ARGV[i + 1])
  end
  redis.call('DEL', size, parts, extra, counted)
  redis.call('SET', claimed, 'done', 'EX', ARGV[3])
  return 1
end
