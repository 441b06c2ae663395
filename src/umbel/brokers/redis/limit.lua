-- Limits for the whole cluster: which claimed messages may start now, and who waits for whom.
-- ARGV: verb, prefix, lease in seconds, then
--   take   owner, epoch, then for each: field, task id, bucket, most at once (0: by its pace; "ends": it will not
--          start), interval, slack.   Reply: place from 0, why, ... of those that may not start; why is "" when the
--          message waits now, and nil when its claim has ended
--   free   owner, then for each: field, bucket.   The claims have ended, and others may start
--   sweep  the same for claims of which nobody said so, and for calls that nobody answered
--   purge  queue.   Reply: how many that wait were removed
-- A slot is held by a claim, and so for as long as its field is in its owner's hash. Who waits is called when it may
-- start: it goes back to its queue, first in line, or among the delayed until it is due. A call holds a slot too; one
-- that is not answered in time (the message was purged, or revoked, or another program took it) is forgotten. Nobody
-- answers in a paused queue: what waits there goes back to it without a call, and asks anew when that is resumed.
-- The pace is that of src/umbel/protocol/delivery/limits.py, word for word.

local ANSWERED_WITHIN = 3 -- leases
local AHEAD_S, AHEAD_MAX = 1, 100 -- so many of a bucket with a pace are called before they are due
local SWEPT_MAX = 500
local PASSED_OVER_MAX = 1000 -- of paused queues; the next sweep goes on
local CHUNK = 1000

local prefix, lease = ARGV[2], tonumber(ARGV[3])
local now = server_time()
local limits, waits, holders = prefix .. 'umbel.limits', prefix .. 'umbel.waits', prefix .. 'umbel.holders'
local paused = prefix .. 'umbel.paused'
even_when_full(prefix)

local function bucket_named(name)
  return {
    name = name, state = prefix .. 'umbel.limit.' .. name,
    slots = prefix .. 'umbel.slots.' .. name, waiting = prefix .. 'umbel.waiting.' .. name,
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
  -- One that was deleted is careful until somebody states it again.
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
  return string.sub(delayed_of(prefix, list_of(field) or prefix), #prefix + #'umbel.delayed.' + 1)
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
  redis.call('ZREMRANGEBYSCORE', bucket.slots, '-inf', string.format('%.6f', now))
end

-- What waits: "<length of the task id>:<task id><field>" NUL envelope.
local function parts_of(entry)
  local length, rest = string.match(entry, '^(%d+):(.*)$')
  local size = tonumber(length or 0)
  local task, member = string.sub(rest or '', 1, size), string.sub(rest or entry, size + 1)
  local cut = string.find(member, '\0', 1, true)
  if not cut then -- somebody else wrote it
    return '', '', entry
  end
  return task, string.sub(member, 1, cut - 1), string.sub(member, cut + 1)
end

-- Call those that may start now, or soon: how many.
local function call(bucket)
  local taken, leaving, passed_over = redis.call('ZCARD', bucket.slots), {}, 0
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
      redis.call('ZADD', bucket.slots, string.format('%.6f', due + ANSWERED_WITHIN * lease), call_of(task))
      taken = taken + 1
    end
    leaving[#leaving + 1] = { entry, task, field, envelope, due }
  end
  for i = #leaving, 1, -1 do -- the last one pushed is the first in line
    local entry, task, field, envelope, due = unpack(leaving[i])
    local parked = due > now and list_of(field) and park(prefix, field, envelope, due)
    if parked or push_or_bury(prefix, 'RPUSH', list_of(field), envelope, now) then
      count_waiting(field, -1)
    else
      redis.call('ZREM', bucket.slots, call_of(task))
      redis.call('RPUSH', bucket.waiting, entry)
    end
  end
  return #leaving - passed_over
end

-- A bucket that nobody waits for is forgotten when it allows everything again.
local function tidy(bucket)
  if redis.call('LLEN', bucket.waiting) > 0 then
    redis.call('ZADD', limits, string.format('%.6f', now + lease), bucket.name)
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
    redis.call('HSET', prefix .. 'umbel.held.' .. owner, field, bucket.name)
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
  redis.call('HSET', bucket.state, 'free_at', string.format('%.6f', bucket.free_at))
  return true
end

local function free(bucket, owner, field)
  try('ZREM', bucket.slots, holder_of(owner, field))
  redis.call('HDEL', prefix .. 'umbel.held.' .. owner, field)
  if not read(bucket) then
    return 0
  end
  local called = call(bucket)
  tidy(bucket)
  return called
end

if ARGV[1] == 'take' then
  local owner, refused = ARGV[4], {}
  local inflight = prefix .. 'umbel.inflight.' .. owner
  local stands = need('hash', 'HGET', inflight, 'epoch') == ARGV[5]
  need('hash', 'HLEN', prefix .. 'umbel.held.' .. owner)
  need('set', 'SCARD', holders)
  need('zset', 'ZCARD', limits)
  for i = 6, #ARGV, 6 do
    local field, task, bucket, most = ARGV[i], ARGV[i + 1], bucket_named(ARGV[i + 2]), ARGV[i + 3]
    local usable, problem = read(bucket)
    local envelope = stands and held(prefix, inflight, field)
    if most == 'ends' then
      if usable and redis.call('ZREM', bucket.slots, call_of(task)) == 1 then
        call(bucket)
        tidy(bucket)
      end
    elseif not usable or not envelope then
      refused[#refused + 1] = (i - 6) / 6
      refused[#refused + 1] = envelope and problem
    else
      redis.call('HSET', bucket.state, 'most', most, 'interval', ARGV[i + 4], 'slack', ARGV[i + 5])
      bucket.most, bucket.interval, bucket.slack = tonumber(most), tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
      local may_start, was_called = start(bucket, owner, field, task)
      if not may_start then
        local entry = #task .. ':' .. task .. field .. '\0' .. envelope
        redis.call(was_called and 'RPUSH' or 'LPUSH', bucket.waiting, entry)
        drop_held(prefix, inflight, field)
        count_waiting(field, 1)
        refused[#refused + 1] = (i - 6) / 6
        refused[#refused + 1] = ''
      end
      call(bucket)
      tidy(bucket)
    end
  end
  return refused
end

if ARGV[1] == 'free' then
  need('hash', 'HLEN', prefix .. 'umbel.held.' .. ARGV[4])
  local called = 0
  for i = 5, #ARGV, 2 do
    called = called + free(bucket_named(ARGV[i + 1]), ARGV[4], ARGV[i])
  end
  return called
end

if ARGV[1] == 'sweep' then
  local called = 0
  for _, owner in ipairs(try('SMEMBERS', holders) or {}) do
    local held = try('HGETALL', prefix .. 'umbel.held.' .. owner) or {}
    for i = 1, #held, 2 do
      if try('HEXISTS', prefix .. 'umbel.inflight.' .. owner, held[i]) ~= 1 then
        called = called + free(bucket_named(held[i + 1]), owner, held[i])
      end
    end
    if #held == 0 then
      redis.call('SREM', holders, owner)
    end
  end
  local quiet = try('ZRANGE', limits, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, SWEPT_MAX) or {}
  for _, name in ipairs(quiet) do
    local bucket = bucket_named(name)
    redis.call('ZADD', limits, string.format('%.6f', now + lease), name)
    if read(bucket) then
      forget_unanswered(bucket)
      called = called + call(bucket)
      tidy(bucket)
    end
  end
  return called
end

local removed = 0
for _, name in ipairs(try('ZRANGE', limits, 0, -1) or {}) do
  local bucket, kept = bucket_named(name), {}
  local entries = read(bucket) and redis.call('LRANGE', bucket.waiting, 0, -1) or {}
  for _, entry in ipairs(entries) do
    local _, field = parts_of(entry)
    if queue_of(field) ~= ARGV[4] then
      kept[#kept + 1] = entry
    end
  end
  if #kept < #entries then
    redis.call('DEL', bucket.waiting)
    for i = 1, #kept, CHUNK do
      redis.call('RPUSH', bucket.waiting, unpack(kept, i, math.min(i + CHUNK - 1, #kept)))
    end
    removed = removed + #entries - #kept
    tidy(bucket)
  end
end
try('HDEL', waits, ARGV[4])
return removed
