-- ---- script settle (with messages, results) --------------------------------------------------------
-- End a group of claims of one owner, all of them or none, with the results and follow-ups that they bring.
-- The arguments and their sections are named by `SETTLE` and `SETTLE_SECTIONS` in `scripts.py`, which defines for each
-- section here where it begins and how many entries it has: `results` and `results_count`. In the order of a section:
--   done       field of a claim whose message ends
--   results    key, payload
--   lists      list, TTL in ms ("": of messages), how many of the envelopes are for it
--   envelopes  envelope
--   delayed    list, when it is due, field, envelope
--   others     verb, field, starts to count, text
--   apart      field in `done` whose envelope is in a separate list
--   marks      key of a signature whose message ends
-- With `check` = 1 each field is looked up. Reply: 0 the claims no longer stand; 1 applied; 2 a field is missing
-- although the epoch stands, so an earlier call whose reply was lost has applied it; or, applied except for what the
-- server refused: section, place in it from 0, why, envelope of a claimed message, ...

local CHUNK = 1000 -- Lua passes only so many arguments at once

local inflight = PREFIX .. 'umbel.inflight.' .. owner
if need('hash', 'HGET', inflight, 'epoch') ~= epoch then
  return 0
end
if check == '1' then
  for i = done, done + done_count - 1 do
    if redis.call('HEXISTS', inflight, ARGV[i]) == 0 then
      return 2
    end
  end
  for i = others, others + 4 * others_count - 1, 4 do
    if redis.call('HEXISTS', inflight, ARGV[i + 1]) == 0 then
      return 2
    end
  end
end

if results_count + lists_count + delayed_count + others_count + marks_count > 0 then -- else only claims end
  even_when_full()
end
for i = marks, marks + marks_count - 1 do -- a signature that is not remembered any more stays so
  try('SET', ARGV[i], '', 'XX', 'KEEPTTL')
end

local refused = {}
local function refuse(section, place, reason, envelope)
  for _, part in ipairs({section, place, reason, envelope or ''}) do
    refused[#refused + 1] = part
  end
end

-- A follow-up that is refused becomes a dead letter in the same step as everything else.
local function refuse_follow_up(section, place, list, envelope, reason)
  local _, reasons = bury_refused(list, envelope, reason)
  refuse(section, place, reasons)
end

for i = 0, results_count - 1 do
  local problem = store_result(ARGV[results + 2 * i], ARGV[results + 2 * i + 1], ttl)
  if problem then
    refuse('results', i, problem)
  end
end

local next_envelope = envelopes
for i = lists, lists + 3 * lists_count - 1, 3 do
  local list, list_ttl, count = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  for first = next_envelope, next_envelope + count - 1, CHUNK do
    local last = math.min(first + CHUNK - 1, next_envelope + count - 1)
    local _, problem = try('LPUSH', list, unpack(ARGV, first, last))
    for k = first, problem and last or first - 1 do
      if list_ttl == '' then
        refuse_follow_up('envelopes', k - envelopes, list, ARGV[k], why(problem, list, 'list'))
      else
        refuse('envelopes', k - envelopes, why(problem, list, 'list'))
      end
    end
  end
  if list_ttl ~= '' and list_ttl ~= '0' then
    try('PEXPIRE', list, list_ttl)
  end
  next_envelope = next_envelope + count
end

for i = 0, delayed_count - 1 do
  local list, due, field, envelope = unpack(ARGV, delayed + 4 * i, delayed + 4 * i + 3)
  local is_there, problem
  if tonumber(due) > server_time() then
    is_there, problem = park(field, envelope, tonumber(due))
  else
    is_there, problem = try('LPUSH', list, envelope)
    problem = problem and why(problem, list, 'list')
  end
  if not is_there then
    refuse_follow_up('delayed', i, list, envelope, problem)
  end
end

for i = done, done + done_count - 1, CHUNK do
  redis.call('HDEL', inflight, unpack(ARGV, i, math.min(i + CHUNK - 1, done + done_count - 1)))
end
for i = apart, apart + apart_count - 1 do
  drop_apart(ARGV[i])
end

-- The result of a failure is stored, so its message ends in any case.
local function keep_or_bury(field, envelope, reason, limits)
  local list = list_of(field)
  local kept, problem = keep(list, envelope, reason, limits)
  if not kept then
    bury(list, envelope, reason .. '; it cannot be stored with the failed tasks: ' .. problem)
  end
  drop_held(inflight, field)
end

for i = others, others + 4 * others_count - 1, 4 do
  local verb, field = ARGV[i], ARGV[i + 1]
  local envelope = held(inflight, field)
  if envelope and verb == 'started' then
    redis.call('HSET', inflight, field, remember(envelope, 1, false))
    drop_apart(field)
  elseif envelope and string.sub(verb, 1, 5) == 'keep ' then -- "keep <limits>"
    keep_or_bury(field, envelope, ARGV[i + 3], string.sub(verb, 6))
  end
end

-- Whether the message is elsewhere now; and a reason if that is not where it was to go.
local function move(verb, field, envelope, text)
  local list = list_of(field)
  if verb == 'bury' then
    local buried, problem = bury(list, envelope, text)
    return buried, problem and 'it cannot be put among the dead letters, and stays with this worker: ' .. problem
  end
  local due = tonumber(string.sub(verb, 8)) -- "return <when it is due>"
  if due <= server_time() then
    return push_or_bury('RPUSH', list, envelope)
  end
  local parked, problem = park(field, envelope, due)
  if parked then
    return true
  end
  return bury_refused(list, envelope, problem)
end

-- Last to first, so that the first of several returned messages is first in its list.
for i = others_count - 1, 0, -1 do
  local verb, field, charged, text = unpack(ARGV, others + 4 * i, others + 4 * i + 3)
  local envelope = verb ~= 'started' and held(inflight, field)
  if envelope then
    envelope = remember(envelope, tonumber(charged), verb ~= 'bury' and text == 'ran')
    local moved, problem = move(verb, field, envelope, text)
    if not moved then -- under another name, so that the same verdict is not applied again
      redis.call('HSET', inflight, 'kept-' .. field, envelope)
    end
    drop_held(inflight, field)
    if problem then
      refuse('others', i, problem, envelope)
    end
  end
end
return #refused == 0 and 1 or refused
