-- End a group of claims of one owner, all of them or none.
-- ARGV: prefix, owner, epoch, check (1: ask for each field), then sections, each with its count first:
--   fields that are done; results (after their TTL in ms): key, payload; pushes: list, TTL in ms ("": of
--   messages), count, envelopes; delayed: list, due, field, envelope; others: verb, field, starts to count, text;
--   those of the done fields that lie apart; keys of the signatures whose messages end (this may be missing).
-- Reply: 0 the claims no longer stand; 1 applied; 2 a field is gone although the epoch stands, so an
-- earlier call whose reply was lost has applied it; or, applied except for what the server refused: section,
-- place in it from 0, why, envelope of a claimed message, ...

local CHUNK = 1000

local prefix, owner = ARGV[1], ARGV[2]
local inflight = prefix .. 'umbel.inflight.' .. owner
if need('hash', 'HGET', inflight, 'epoch') ~= ARGV[3] then
  return 0
end
local now
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

local first_apart = first_other + 4 * others + 1
local first_mark = first_apart + tonumber(ARGV[first_apart - 1]) + 1
if results + pushes + delayed + others > 0 or #ARGV >= first_mark then -- else only claims end
  now = server_time()
  even_when_full(prefix)
end
for i = first_mark, #ARGV do -- one that is not remembered any more stays so
  try('SET', ARGV[i], '', 'XX', 'KEEPTTL')
end

local refused = {}
local function refuse(section, place, reason, envelope)
  for _, part in ipairs({section, place, reason, envelope or ''}) do
    refused[#refused + 1] = part
  end
end

-- A follow-up has its end in the same step as everything else: among the dead letters.
local function refuse_follow_up(section, place, list, envelope, reason)
  local _, reasons = bury_refused(prefix, list, envelope, reason, now)
  refuse(section, place, reasons)
end

for i = 0, results - 1 do
  local problem = store_result(ARGV[first_result + 2 * i], ARGV[first_result + 2 * i + 1], ttl)
  if problem then
    refuse('result', i, problem)
  end
end

local place = 0 -- among all that is pushed
at = first_push + 1
for _ = 1, pushes do
  local list, list_ttl, count = next_argument(), next_argument(), tonumber(next_argument())
  for first = at, at + count - 1, CHUNK do
    local last = math.min(first + CHUNK - 1, at + count - 1)
    local _, problem = try('LPUSH', list, unpack(ARGV, first, last))
    for i = first, problem and last or first - 1 do
      if list_ttl == '' then
        refuse_follow_up('push', place + i - at, list, ARGV[i], why(problem, list, 'list'))
      else
        refuse('push', place + i - at, why(problem, list, 'list'))
      end
    end
  end
  if list_ttl ~= '' and list_ttl ~= '0' then
    try('PEXPIRE', list, list_ttl)
  end
  place = place + count
  at = at + count
end

at = first_delayed
for i = 0, delayed - 1 do
  local list, due, field, envelope = next_argument(), tonumber(next_argument()), next_argument(), next_argument()
  local done_so, problem
  if due > now then
    done_so, problem = park(prefix, field, envelope, due)
  else
    done_so, problem = try('LPUSH', list, envelope)
    problem = problem and why(problem, list, 'list')
  end
  if not done_so then
    refuse_follow_up('later', i, list, envelope, problem)
  end
end

for i = first_done, first_done + done - 1, CHUNK do
  redis.call('HDEL', inflight, unpack(ARGV, i, math.min(i + CHUNK - 1, first_done + done - 1)))
end
for i = first_apart, first_mark - 2 do
  drop_apart(prefix, ARGV[i])
end

-- The failure is stored, so the message ends in any case.
local function keep_or_bury(field, envelope, reason, limits)
  local list = list_of(field)
  local kept, problem = keep(prefix, list, envelope, reason, now, limits)
  if not kept then
    bury(prefix, list, envelope, reason .. '; it cannot be stored with the failed tasks: ' .. problem, now)
  end
  drop_held(prefix, inflight, field)
end

for i = 0, others - 1 do
  local verb, field = ARGV[first_other + 4 * i], ARGV[first_other + 4 * i + 1]
  local envelope = held(prefix, inflight, field)
  if envelope and verb == 'started' then
    redis.call('HSET', inflight, field, remember(envelope, 1, false))
    drop_apart(prefix, field)
  elseif envelope and string.sub(verb, 1, 5) == 'keep ' then -- "keep <limits>"
    keep_or_bury(field, envelope, ARGV[first_other + 4 * i + 3], string.sub(verb, 6))
  end
end

-- Whether the message is elsewhere now; and a reason, if that is not where it was to go.
local function move(verb, field, envelope, text)
  local list = list_of(field)
  if verb == 'bury' then
    local buried, problem = bury(prefix, list, envelope, text, now)
    return buried, problem and 'it cannot be put among the dead letters, and stays with this worker: ' .. problem
  end
  local due = tonumber(string.sub(verb, 8)) -- "return <when it is due>"
  if due <= now then
    return push_or_bury(prefix, 'RPUSH', list, envelope, now)
  end
  local parked, problem = park(prefix, field, envelope, due)
  if parked then
    return true
  end
  return bury_refused(prefix, list, envelope, problem, now)
end

-- Last to first, so that the first of several returned ones is first in line.
for i = others - 1, 0, -1 do
  at = first_other + 4 * i
  local verb, field, charged, text = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local envelope = verb ~= 'started' and held(prefix, inflight, field)
  if envelope then
    envelope = remember(envelope, charged, verb ~= 'bury' and text == 'ran')
    local moved, problem = move(verb, field, envelope, text)
    if not moved then -- under another name, so that the same verdict is not applied once more
      redis.call('HSET', inflight, 'kept-' .. field, envelope)
    end
    drop_held(prefix, inflight, field)
    if problem then
      refuse('claim', i, problem, envelope)
    end
  end
end
return #refused == 0 and 1 or refused
