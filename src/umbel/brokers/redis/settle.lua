-- End a group of claims of one owner, all of them or none.
-- ARGV: prefix, owner, epoch, check (1: ask for each field), then sections, each with its count first:
--   fields that are done; results (after their TTL in ms): key, payload; pushes: list, TTL in ms, count, envelopes;
--   delayed: list, due, field, envelope; others: verb, field, starts to count, text.
-- Reply: 0 the claims no longer stand; 1 applied; 2 a field is gone although the epoch stands, so an
-- earlier call whose reply was lost has applied it.

local CHUNK = 1000
local DEAD_MAX = 100000

local prefix, owner = ARGV[1], ARGV[2]
local inflight = prefix .. 'umbel.inflight.' .. owner
if redis.call('HGET', inflight, 'epoch') ~= ARGV[3] then
  return 0
end
local now = server_time()
even_when_full(prefix)
local at = 5

local function next_argument()
  at = at + 1
  return ARGV[at - 1]
end

local done = tonumber(next_argument())
local first_done = at
at = at + done
if ARGV[4] == '1' then
  for i = first_done, first_done + done - 1 do
    if redis.call('HEXISTS', inflight, ARGV[i]) == 0 then
      return 2
    end
  end
end

local results = tonumber(next_argument())
local ttl = next_argument()
local first_result = at
at = at + 2 * results
local first_push = at
local pushes = tonumber(next_argument())
for _ = 1, pushes do
  at = at + 2
  at = at + 1 + tonumber(ARGV[at])
end
local delayed = tonumber(next_argument())
local first_delayed = at
at = at + 4 * delayed
local others = tonumber(next_argument())
local first_other = at
if ARGV[4] == '1' then
  for i = 0, others - 1 do
    if redis.call('HEXISTS', inflight, ARGV[first_other + 4 * i + 1]) == 0 then
      return 2
    end
  end
end

for i = 0, results - 1 do
  local key, payload = ARGV[first_result + 2 * i], ARGV[first_result + 2 * i + 1]
  store_result(key, payload, ttl)
end

at = first_push + 1
for _ = 1, pushes do
  local list, list_ttl, count = next_argument(), next_argument(), tonumber(next_argument())
  for i = at, at + count - 1, CHUNK do
    redis.call('LPUSH', list, unpack(ARGV, i, math.min(i + CHUNK - 1, at + count - 1)))
  end
  if list_ttl ~= '0' then
    redis.call('PEXPIRE', list, list_ttl)
  end
  at = at + count
end

at = first_delayed
for _ = 1, delayed do
  local list, due, field, envelope = next_argument(), tonumber(next_argument()), next_argument(), next_argument()
  if due > now then
    park(prefix, field, envelope, due)
  else
    redis.call('LPUSH', list, envelope)
  end
end

for i = first_done, first_done + done - 1, CHUNK do
  redis.call('HDEL', inflight, unpack(ARGV, i, math.min(i + CHUNK - 1, first_done + done - 1)))
end

local function bury(field, envelope, reason)
  local bare, mark = unmarked(envelope)
  local dead = prefix .. 'umbel.dead'
  redis.call('XADD', dead, '*', 'list', list_of(field), 'envelope', bare, 'reason', reason,
    'starts', mark.starts or 0, 'at', string.format('%.6f', now))
  local excess = redis.call('XLEN', dead) - DEAD_MAX
  if excess > 0 then
    redis.call('XTRIM', dead, 'MAXLEN', DEAD_MAX)
    redis.call('INCRBY', prefix .. 'umbel.dead.dropped', excess)
  end
end

for i = 0, others - 1 do
  local field = ARGV[first_other + 4 * i + 1]
  if ARGV[first_other + 4 * i] == 'started' then
    local envelope = redis.call('HGET', inflight, field)
    if envelope then
      redis.call('HSET', inflight, field, remember(envelope, 1, false))
    end
  end
end

-- Last to first, so that the first of several returned ones is first in line.
for i = others - 1, 0, -1 do
  at = first_other + 4 * i
  local verb, field, charged, text = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local envelope = verb ~= 'started' and redis.call('HGET', inflight, field)
  if envelope then
    redis.call('HDEL', inflight, field)
    if verb == 'bury' then
      bury(field, remember(envelope, charged, false), text)
    else -- "return <when it is due>"
      envelope = remember(envelope, charged, text == 'ran')
      local due = tonumber(string.sub(verb, 8))
      if due > now then
        park(prefix, field, envelope, due)
      else
        redis.call('RPUSH', list_of(field), envelope)
      end
    end
  end
end
return 1
