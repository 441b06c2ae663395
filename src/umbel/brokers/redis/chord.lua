-- Chords under Celery's keys (wire 6.2): which parts have ended, and whether the body was sent.
-- ARGV: verb, base key (".s" size, ".j" parts, ".t" extra parts, ".d" counted, ".c" claim; ours: ".a" the tasks
-- that ".t" counts), ...
--   start  base size ttl_s
--   add    base ttl_s place mark part      -> all parts in order when none is missing, else nothing
--   grow   base ttl_s task                 one part more, once for each task
--   claim  base by ttl_s                   -> 1 if `by` may send the body, else 0
--   end    base done_s prefix (list envelope)...  -> 0 if it had ended; else 1, and place from 0, why, ... of what was
--          refused: that is among the dead letters

local verb, base = ARGV[1], ARGV[2]
local size, parts, extra = base .. '.s', base .. '.j', base .. '.t'
local counted, claimed, grown = base .. '.d', base .. '.c', base .. '.a'
local is_done = need('string', 'GET', claimed) == 'done'

local function count_in(key)
  local text = need('string', 'GET', key)
  if text and not whole(text) then
    error("REFUSED the key '" .. key .. "' holds no number: delete it", 0)
  end
  return text and whole(text)
end

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
  local wanted, added = count_in(size), count_in(extra) or 0
  need('zset', 'ZCARD', parts)
  if need('set', 'SISMEMBER', counted, ARGV[5]) == 0 then
    redis.call('ZADD', parts, ARGV[4], ARGV[6])
    redis.call('SADD', counted, ARGV[5])
  end
  for _, key in ipairs({ size, parts, extra, counted }) do
    redis.call('EXPIRE', key, ARGV[3])
  end
  if not wanted then
    return false
  end
  if redis.call('ZCARD', parts) < wanted + added then
    return false
  end
  return redis.call('ZRANGE', parts, 0, -1)
elseif verb == 'grow' then
  count_in(extra)
  if not is_done and need('set', 'SISMEMBER', grown, ARGV[4]) == 0 then
    redis.call('SADD', grown, ARGV[4])
    redis.call('INCR', extra)
    redis.call('EXPIRE', grown, ARGV[3])
    redis.call('EXPIRE', extra, ARGV[3])
  end
  return 1
elseif verb == 'claim' then
  if redis.call('SET', claimed, ARGV[3], 'NX', 'EX', ARGV[4]) then
    return 1
  end
  return redis.call('GET', claimed) == ARGV[3] and 1 or 0
elseif verb == 'end' then
  if is_done then
    return 0
  end
  unless_full(ARGV[4])
  local now, reply = server_time(), {1}
  for i = 5, #ARGV, 2 do
    local _, problem = push_or_bury(ARGV[4], 'LPUSH', ARGV[i], ARGV[i + 1], now)
    if problem then
      reply[#reply + 1] = (i - 5) / 2
      reply[#reply + 1] = problem
    end
  end
  redis.call('DEL', size, parts, extra, counted, grown)
  redis.call('SET', claimed, 'done', 'EX', ARGV[3])
  return reply
end
