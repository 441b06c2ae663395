-- Limits for the whole cluster: which claimed messages may start, and which wait.

-- ---- part buckets ----------------------------------------------------------------------------------
-- A bucket is what a limit allows for one task and one key: what it allows, which claims hold a slot, which messages
-- wait and which are called. A slot is held by a claim, for as long as its field is in its owner's hash. A waiting
-- message is called when it may start: it goes back to its queue, first in its list, or is delayed until it is due. A
-- call holds a slot, too; a call that is not answered in time, because another program took the message, is forgotten.
-- No worker answers a call in a paused queue: messages of paused queues go back without a call, and ask again when the
-- queue is resumed. The pace is that of src/umbel/protocol/delivery/limits.py, word for word.
-- ARGV begins with: verb, lease in seconds.

local ANSWERED_WITHIN = 3 -- leases

local lease = tonumber(ARGV[2])
local now = server_time()
local limits, waits, holders = PREFIX .. 'umbel.limits', PREFIX .. 'umbel.waits', PREFIX .. 'umbel.holders'
local paused = PREFIX .. 'umbel.paused'
even_when_full()

local function bucket_named(name)
  return {
    name = name, state = PREFIX .. 'umbel.limit.' .. name,
    slots = PREFIX .. 'umbel.slots.' .. name, waiting = PREFIX .. 'umbel.waiting.' .. name,
  }
end

-- Read what the bucket allows: true, or nil and why it cannot be used.
local function read(bucket)
  for key, kind in pairs({ [bucket.slots] = 'zset', [bucket.waiting] = 'list' }) do
    local _, problem = try(kind == 'zset' and 'ZCARD' or 'LLEN', key)
    if problem then
      return nil, why(problem, key, kind)
    end
  end
  local found, problem = try('HMGET', bucket.state, 'most', 'interval', 'slack', 'free_at')
  if problem then
    return nil, why(problem, bucket.state, 'hash')
  end
  -- A bucket whose state was deleted lets one message run at a time until a message states the limit again.
  bucket.most, bucket.interval = tonumber(found[1]) or 1, tonumber(found[2]) or 0
  bucket.slack, bucket.free_at = tonumber(found[3]) or 0, tonumber(found[4]) or 0
  return true
end

local function holder_of(owner, field)
  return owner .. '\n' .. field
end

local function call_of(task)
  return '\n' .. task
end

local function queue_of(field)
  return string.sub(delayed_of(list_of(field) or PREFIX), #PREFIX + #'umbel.delayed.' + 1)
end

local function held_by(owner)
  return PREFIX .. 'umbel.held.' .. owner
end

local function count_waiting(field, change)
  local queue = queue_of(field)
  if try('HINCRBY', waits, queue, change) == 0 then
    redis.call('HDEL', waits, queue)
  end
end

-- It is never later than this, unless the clock was set back.
local function free_at(bucket)
  return math.min(bucket.free_at, now + bucket.slack + bucket.interval)
end

local function forget_unanswered(bucket)
  redis.call('ZREMRANGEBYSCORE', bucket.slots, '-inf', instant(now))
end

-- An entry of a waiting message: "<length of the task id>:<task id><field>" NUL envelope.
local function parts_of(entry)
  local length, rest = string.match(entry, '^(%d+):(.*)$')
  local size = tonumber(length or 0)
  local task, member = string.sub(rest or '', 1, size), string.sub(rest or entry, size + 1)
  local cut = string.find(member, '\0', 1, true)
  if not cut then -- another program wrote it
    return '', '', entry
  end
  return task, string.sub(member, 1, cut - 1), string.sub(member, cut + 1)
end

-- Call the messages that may start now, or soon: how many.
local function call(bucket)
  local taken, leaving, passed_over, called_until = redis.call('ZCARD', bucket.slots), {}, 0, nil
  local room = bucket.most
  if room == 0 then
    room = math.max(1, math.min(AHEAD_MAX, math.floor(AHEAD_S / bucket.interval)))
  end
  while taken < room and passed_over < PASSED_OVER_MAX do
    local entry = redis.call('RPOP', bucket.waiting)
    if not entry then
      break
    end
    local task, field, envelope = parts_of(entry)
    local due = now
    if try('HEXISTS', paused, queue_of(field)) == 1 then
      passed_over = passed_over + 1
    else
      if bucket.most == 0 then
        due = math.max(math.max(free_at(bucket), now) + taken * bucket.interval - bucket.slack, now)
      end
      called_until = due + ANSWERED_WITHIN * lease
      redis.call('ZADD', bucket.slots, instant(called_until), call_of(task))
      taken = taken + 1
    end
    leaving[#leaving + 1] = { entry, task, field, envelope, due }
  end
  if called_until then
    note_holding(math.ceil((called_until - now) * 1000))
  end
  for i = #leaving, 1, -1 do -- the last one pushed is the first in its list
    local entry, task, field, envelope, due = unpack(leaving[i])
    local parked = due > now and list_of(field) and park(field, envelope, due)
    if parked or push_or_bury('RPUSH', list_of(field), envelope) then
      count_waiting(field, -1)
    else
      redis.call('ZREM', bucket.slots, call_of(task))
      redis.call('RPUSH', bucket.waiting, entry)
    end
  end
  return #leaving - passed_over
end

-- A bucket that no message waits for is forgotten when it allows everything again.
local function tidy(bucket)
  if redis.call('LLEN', bucket.waiting) > 0 then
    redis.call('ZADD', limits, instant(now + lease), bucket.name)
    redis.call('PERSIST', bucket.state)
  else
    redis.call('ZREM', limits, bucket.name)
    local kept_s = math.max(lease, free_at(bucket) - now + bucket.slack)
    redis.call('PEXPIRE', bucket.state, math.ceil(kept_s * 1000))
  end
  local last = redis.call('ZRANGE', bucket.slots, -1, -1, 'WITHSCORES')[2]
  if last == 'inf' then
    redis.call('PERSIST', bucket.slots)
  elseif last then
    redis.call('PEXPIREAT', bucket.slots, string.format('%.0f', tonumber(last) * 1000 + 1000))
  end
end

-- End the call of a message that will not start: another one may be called.
local function end_call(bucket, task)
  if redis.call('ZREM', bucket.slots, call_of(task)) == 1 then
    call(bucket)
    tidy(bucket)
  end
end

-- ---- script limit (with messages, buckets) ---------------------------------------------------------
-- ARGV after the first two:
--   take   owner, epoch, then for each: field, task id, bucket, most at once (0: by its pace; "ends": it will not
--          start), interval, slack.   Reply: place from 0, why, ... of those that may not start; why is "" if the
--          message waits now, and nil if its claim has ended
--   free   owner, then for each: field, bucket.   The claims have ended, and others may start
--   sweep  the same for ended claims that were not reported, and for calls that were not answered

local SWEPT_MAX = 500

-- Whether the message may start; if not, whether it was called before.
local function start(bucket, owner, field, task)
  local was_called = redis.call('ZREM', bucket.slots, call_of(task)) == 1
  forget_unanswered(bucket)
  local taken = redis.call('ZCARD', bucket.slots)
  if bucket.most > 0 then
    if taken >= bucket.most then
      return false, was_called
    end
    redis.call('ZADD', bucket.slots, '+inf', holder_of(owner, field))
    redis.call('HSET', held_by(owner), field, bucket.name)
    redis.call('SADD', holders, owner)
    return true
  end
  if not was_called and (taken > 0 or redis.call('LLEN', bucket.waiting) > 0) then
    return false, false -- others came before
  end
  local free = free_at(bucket)
  if now < free - bucket.slack then
    return false, was_called
  end
  bucket.free_at = math.max(free, now) + bucket.interval
  redis.call('HSET', bucket.state, 'free_at', instant(bucket.free_at))
  return true
end

local function free(bucket, owner, field)
  try('ZREM', bucket.slots, holder_of(owner, field))
  redis.call('HDEL', held_by(owner), field)
  if not read(bucket) then
    return 0
  end
  local called = call(bucket)
  tidy(bucket)
  return called
end

if ARGV[1] == 'take' then
  local owner, epoch, refused = ARGV[3], ARGV[4], {}
  local inflight = PREFIX .. 'umbel.inflight.' .. owner
  local stands = need('hash', 'HGET', inflight, 'epoch') == epoch
  need('hash', 'HLEN', held_by(owner))
  need('set', 'SCARD', holders)
  need('zset', 'ZCARD', limits)
  for i = 5, #ARGV, 6 do
    local field, task, name, most, interval, slack = unpack(ARGV, i, i + 5)
    local bucket = bucket_named(name)
    local usable, problem = read(bucket)
    local envelope = stands and held(inflight, field)
    if most == 'ends' then
      if usable then
        end_call(bucket, task)
      end
    elseif not usable or not envelope then
      refused[#refused + 1] = (i - 5) / 6
      refused[#refused + 1] = envelope and problem
    else
      redis.call('HSET', bucket.state, 'most', most, 'interval', interval, 'slack', slack)
      bucket.most, bucket.interval, bucket.slack = tonumber(most), tonumber(interval), tonumber(slack)
      local may_start, was_called = start(bucket, owner, field, task)
      if not may_start then
        local entry = #task .. ':' .. task .. field .. '\0' .. envelope
        redis.call(was_called and 'RPUSH' or 'LPUSH', bucket.waiting, entry)
        drop_held(inflight, field)
        count_waiting(field, 1)
        refused[#refused + 1] = (i - 5) / 6
        refused[#refused + 1] = ''
      end
      call(bucket)
      tidy(bucket)
    end
  end
  return refused
end

if ARGV[1] == 'free' then
  local owner, called = ARGV[3], 0
  need('hash', 'HLEN', held_by(owner))
  for i = 4, #ARGV, 2 do
    called = called + free(bucket_named(ARGV[i + 1]), owner, ARGV[i])
  end
  return called
end

if ARGV[1] == 'sweep' then
  local called = 0
  for _, owner in ipairs(try('SMEMBERS', holders) or {}) do
    local slots = try('HGETALL', held_by(owner)) or {}
    for i = 1, #slots, 2 do
      if try('HEXISTS', PREFIX .. 'umbel.inflight.' .. owner, slots[i]) ~= 1 then
        called = called + free(bucket_named(slots[i + 1]), owner, slots[i])
      end
    end
    if #slots == 0 then
      redis.call('SREM', holders, owner)
    end
  end
  local quiet = try('ZRANGE', limits, '-inf', instant(now), 'BYSCORE', 'LIMIT', 0, SWEPT_MAX) or {}
  for _, name in ipairs(quiet) do
    local bucket = bucket_named(name)
    redis.call('ZADD', limits, instant(now + lease), name)
    if read(bucket) then
      forget_unanswered(bucket)
      called = called + call(bucket)
      tidy(bucket)
    end
  end
  return called
end

-- ---- script purge (with messages, buckets) ---------------------------------------------------------
-- Remove messages that wait in a queue, a portion at a time, and free what they hold.
-- ARGV after the first two: queue, then
--   limited  bucket, ...   messages that wait for these limits. Reply: how many; how many of the buckets are done
--   rest                   all others.                          Reply: how many; 1 if there may be more
-- If no message can hold anything, the lists are removed as a whole, which costs the server no time.

local PORTION, PORTION_BYTES = 500, 1000000 -- a few milliseconds
local CHUNK = 1000 -- Lua passes only so many arguments at once

local verb, queue = ARGV[1], ARGV[3]
local removed, bytes = 0, 0

local function is_full()
  return removed >= PORTION or bytes >= PORTION_BYTES
end

local function remove(envelope)
  removed = removed + 1
  bytes = bytes + #envelope
  local headers = holding_headers(envelope)
  if not headers then
    return
  end
  release_key(headers)
  local name = limit_of(headers)
  if name then
    local bucket = bucket_named(name)
    if try('ZREM', bucket.slots, call_of(headers.id)) == 1 and read(bucket) then -- it was called
      call(bucket)
      tidy(bucket)
    end
  end
end

-- Messages of other queues wait for the same limit and keep their order: the list is written again as a whole.
local function remove_among_others(bucket)
  local others = {}
  for _, entry in ipairs(redis.call('LRANGE', bucket.waiting, 0, -1)) do
    local _, field, envelope = parts_of(entry)
    if queue_of(field) == queue then
      count_waiting(field, -1)
      remove(envelope)
    else
      others[#others + 1] = entry
    end
  end
  redis.call('DEL', bucket.waiting)
  for i = 1, #others, CHUNK do
    redis.call('RPUSH', bucket.waiting, unpack(others, i, math.min(i + CHUNK - 1, #others)))
  end
end

local function remove_waiting(bucket)
  while not is_full() do
    local entry = redis.call('RPOP', bucket.waiting)
    if not entry then
      return
    end
    local _, field, envelope = parts_of(entry)
    if queue_of(field) ~= queue then
      redis.call('RPUSH', bucket.waiting, entry)
      remove_among_others(bucket)
      return
    end
    count_waiting(field, -1)
    remove(envelope)
  end
end

if verb == 'limited' then
  for i = 4, #ARGV do
    local bucket = bucket_named(ARGV[i])
    if read(bucket) then
      remove_waiting(bucket)
      tidy(bucket)
    end
    if is_full() then
      return {removed, i - 4}
    end
  end
  return {removed, #ARGV - 3}
end

local lists, delayed = {}, PREFIX .. 'umbel.delayed.' .. queue
for i, suffix in ipairs(SUFFIXES) do
  lists[i] = PREFIX .. queue .. suffix
end
if redis.call('EXISTS', PREFIX .. 'umbel.holding') == 0 then
  for _, list in ipairs(lists) do
    removed = removed + (try('LLEN', list) or 0)
  end
  removed = removed + (try('ZCARD', delayed) or 0)
else
  for _, list in ipairs(lists) do
    local envelope = not is_full() and try('RPOP', list)
    while envelope do
      remove(envelope)
      envelope = not is_full() and try('RPOP', list)
    end
  end
  local popped = not is_full() and try('ZPOPMIN', delayed)
  while popped and popped[1] do
    remove(string.sub(popped[1], (string.find(popped[1], '\0', 1, true) or 0) + 1))
    popped = not is_full() and try('ZPOPMIN', delayed)
  end
  if is_full() then
    return {removed, 1}
  end
end
redis.call('UNLINK', delayed, unpack(lists)) -- also keys of other types, which another program has made
return {removed, 0}
