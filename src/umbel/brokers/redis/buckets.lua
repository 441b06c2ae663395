-- Buckets of limits for the whole cluster: what they allow, who holds a slot, who waits and is called.
-- A slot is held by a claim, and so for as long as its field is in its owner's hash. Who waits is called when it may
-- start: it goes back to its queue, first in line, or among the delayed until it is due. A call holds a slot too; one
-- that is not answered in time (another program took the message) is forgotten. Nobody
-- answers in a paused queue: what waits there goes back to it without a call, and asks anew when that is resumed.
-- The pace is that of src/umbel/protocol/delivery/limits.py, word for word.

local ANSWERED_WITHIN = 3 -- leases
local AHEAD_S, AHEAD_MAX = 1, 100 -- so many of a bucket with a pace are called before they are due
local PASSED_OVER_MAX = 1000 -- of paused queues; the next sweep goes on

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
      redis.call('ZADD', bucket.slots, string.format('%.6f', called_until), call_of(task))
      taken = taken + 1
    end
    leaving[#leaving + 1] = { entry, task, field, envelope, due }
  end
  if called_until then
    note_holding(prefix, math.ceil((called_until - now) * 1000))
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
