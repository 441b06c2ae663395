-- Results of tasks, and chords, under Celery's keys.

-- ---- part results ----------------------------------------------------------------------------------
-- The first SUCCESS of a task stays. The key is also the channel on which clients of Celery and Umbel wait.

local function is_success(payload)
  if string.find(payload, '^{%s*"status"%s*:%s*"SUCCESS"') then
    return true
  end
  if string.find(payload, '^{%s*"status"%s*:') then
    return false
  end
  local readable, map = pcall(cjson.decode, payload)
  return readable and type(map) == 'table' and map.status == 'SUCCESS'
end

-- Store a result for `ttl` ms (0: for ever): nothing, or why it was refused. This runs for every task, so it saves
-- the calls of `try`.
local function store_result(key, payload, ttl)
  local reply = redis.pcall('GET', key)
  if type(reply) == 'table' then
    return why(reply.err, key, 'string')
  end
  if reply and is_success(reply) then
    return
  end
  if ttl == '0' then
    reply = redis.pcall('SET', key, payload)
  else
    reply = redis.pcall('SET', key, payload, 'PX', ttl)
  end
  if not reply.err then
    reply = redis.pcall('PUBLISH', key, payload)
  end
  if type(reply) == 'table' then
    return why(reply.err, key, 'string')
  end
end

-- ---- script store (with results) -------------------------------------------------------------------
-- ARGV: TTL in ms (0: for ever), then key, payload...   Reply: place from 0, why, ... of results that were refused.

unless_full()
local refused = {}
for i = 2, #ARGV, 2 do
  local problem = store_result(ARGV[i], ARGV[i + 1], ARGV[1])
  if problem then
    refused[#refused + 1] = (i - 2) / 2
    refused[#refused + 1] = problem
  end
end
return refused

-- ---- script chord (with messages) ------------------------------------------------------------------
-- Which parts of a chord have ended, and whether its body was sent (wire 6.2).
-- ARGV: verb, base key (".s" size, ".j" parts, ".t" extra parts, ".d" counted, ".c" claim; ours: ".a" the tasks
-- that ".t" counts), ...
--   start  size, TTL in s
--   add    TTL in s, place, id of the part, part   -> all parts in order if none is missing, else nothing
--   grow   TTL in s, task                          one part more, once for each task
--   claim  task, TTL in s                          -> 1 if this task may send the body, else 0
--   end    TTL in s, then list, envelope, ...      -> 0 if it had ended; else 1, and place from 0, why, ... of
--                                                  messages that were refused: they are dead letters

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
  -- A sender that was redelivered starts it again: the chord continues with the parts that it has.
  if not is_done then
    redis.call('SET', size, ARGV[3], 'EX', ARGV[4])
  end
  return 1
elseif verb == 'add' then
  local ttl_s, place, part_id, part = unpack(ARGV, 3)
  if is_done then
    return false
  end
  local wanted, added = count_in(size), count_in(extra) or 0
  need('zset', 'ZCARD', parts)
  if need('set', 'SISMEMBER', counted, part_id) == 0 then
    redis.call('ZADD', parts, place, part)
    redis.call('SADD', counted, part_id)
  end
  for _, key in ipairs({ size, parts, extra, counted }) do
    redis.call('EXPIRE', key, ttl_s)
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
  unless_full()
  local reply = {1}
  for i = 4, #ARGV, 2 do
    local _, problem = push_or_bury('LPUSH', ARGV[i], ARGV[i + 1])
    if problem then
      reply[#reply + 1] = (i - 4) / 2
      reply[#reply + 1] = problem
    end
  end
  redis.call('DEL', size, parts, extra, counted, grown)
  redis.call('SET', claimed, 'done', 'EX', ARGV[3])
  return reply
end
