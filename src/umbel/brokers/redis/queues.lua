-- Queues: how messages get into them, how many are there, and how they move; dead letters and failures.

-- ---- script publish (with messages) ----------------------------------------------------------------
-- Publish a batch, all of it or nothing: to several lists, or delayed, as workers of Umbel do (clients push as Celery
-- does, and a claim delays what is not due).
-- ARGV for each message: list, when it is due (0: now), field, envelope ("" asks only whether the list takes it).

local seen = {}
for i = 1, #ARGV, 4 do
  local list, is_later = ARGV[i], tonumber(ARGV[i + 1]) > server_time()
  local key = is_later and delayed_of(list) or list
  if not seen[key] then
    seen[key] = true
    if is_later then
      need('zset', 'ZCARD', key)
    else
      need('list', 'LLEN', key)
    end
  end
end
unless_full()
for i = 1, #ARGV, 4 do
  local list, due, field, envelope = unpack(ARGV, i, i + 3)
  if envelope == '' then
    -- the list was looked at, and that is all
  elseif tonumber(due) > server_time() then
    park(field, envelope, tonumber(due))
  else
    redis.call('LPUSH', list, envelope)
  end
end
return 1

-- ---- script publish_once ---------------------------------------------------------------------------
-- Publish a batch, all of it or nothing, without the messages whose ids were published within this time.
-- ARGV: milliseconds to remember an id, then for each message: id, list, envelope. A message that goes to several
-- lists comes once for each.   Reply: how many were pushed.

local remembered_ms, seen = ARGV[1], {}
for i = 2, #ARGV, 3 do
  local list = ARGV[i + 1]
  if not seen[list] then
    seen[list] = true
    need('list', 'LLEN', list)
  end
end
unless_full()
local is_new, pushed = {}, 0
for i = 2, #ARGV, 3 do
  local id, list, envelope = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if is_new[id] == nil then
    is_new[id] = redis.call('SET', PREFIX .. 'umbel.sent.' .. id, '', 'NX', 'PX', remembered_ms) and true or false
  end
  if is_new[id] then
    redis.call('LPUSH', list, envelope)
    pushed = pushed + 1
  end
end
return pushed

-- ---- script depths (with messages) -----------------------------------------------------------------
-- How full the queues are.   Reply: queue, ready, delayed, claimed, waiting for a limit, queue, ...

local claimed = {}
for _, owner in ipairs(try('ZRANGE', PREFIX .. 'umbel.owners', 0, -1) or {}) do
  for _, field in ipairs(try('HKEYS', PREFIX .. 'umbel.inflight.' .. owner) or {}) do
    if field ~= 'epoch' then
      local queue = delayed_of(list_of(field) or '')
      claimed[queue] = (claimed[queue] or 0) + 1
    end
  end
end
local handing = try('HGETALL', PREFIX .. 'umbel.handing') or {}
for i = 1, #handing, 2 do
  local queue = delayed_of(handing[i + 1])
  claimed[queue] = (claimed[queue] or 0) + (try('LLEN', PREFIX .. 'umbel.handed.' .. handing[i]) or 0)
end
local reply = {}
for _, queue in ipairs(try('SMEMBERS', PREFIX .. 'umbel.queues') or {}) do
  local ready, delayed = 0, PREFIX .. 'umbel.delayed.' .. queue
  for _, suffix in ipairs(SUFFIXES) do
    ready = ready + (try('LLEN', PREFIX .. queue .. suffix) or 0)
  end
  reply[#reply + 1] = queue
  reply[#reply + 1] = ready
  reply[#reply + 1] = try('ZCARD', delayed) or 0
  reply[#reply + 1] = claimed[delayed] or 0
  reply[#reply + 1] = whole(try('HGET', PREFIX .. 'umbel.waits', queue) or 0) or 0
end
return reply

-- ---- script move (with messages) -------------------------------------------------------------------
-- Move waiting messages of one queue to another, in the order of claims, then delayed ones.
-- ARGV: source, target, limit.   Reply: how many; 1 if the next one is signed, which stays.
-- Each keeps its envelope with its mark, its priority and its time, and is last in its new list.

local source, target, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])
local parked, later = PREFIX .. 'umbel.delayed.' .. source, PREFIX .. 'umbel.delayed.' .. target
for _, suffix in ipairs(SUFFIXES) do
  need('list', 'LLEN', PREFIX .. source .. suffix)
  need('list', 'LLEN', PREFIX .. target .. suffix)
end
need('zset', 'ZCARD', parked)
need('zset', 'ZCARD', later)

-- The body is base64: only headers can contain this name.
local function is_signed(envelope)
  return string.find(envelope, '"umbel_signature"') ~= nil
end

local moved = 0
for _, suffix in ipairs(SUFFIXES) do
  local from, to = PREFIX .. source .. suffix, PREFIX .. target .. suffix
  while moved < limit do
    local envelope = redis.call('LINDEX', from, -1)
    if not envelope then
      break
    elseif is_signed(envelope) then
      return {moved, 1}
    end
    redis.call('LMOVE', from, to, 'RIGHT', 'LEFT')
    moved = moved + 1
  end
end

-- The name of a delayed message has the list that it goes back to, which becomes the same list of the other queue.
local function renamed(member)
  local cut = string.find(member, '\0', 1, true)
  local list = cut and list_of(string.sub(member, 1, cut - 1))
  for _, suffix in ipairs(SUFFIXES) do
    if list == PREFIX .. source .. suffix then
      return string.sub(member, 1, cut - 1 - #list) .. PREFIX .. target .. suffix .. string.sub(member, cut)
    end
  end
  return member
end

local waiting = redis.call('ZRANGE', parked, 0, limit - moved - 1, 'WITHSCORES')
for i = 1, limit > moved and #waiting or 0, 2 do
  if is_signed(waiting[i]) then
    return {moved, 1}
  end
  if redis.call('ZADD', later, 'NX', waiting[i + 1], renamed(waiting[i])) == 1 then
    redis.call('ZREM', parked, waiting[i])
    moved = moved + 1
  end
end
return {moved, 0}

-- ---- script bury (with messages) -------------------------------------------------------------------
-- Put messages among the dead letters, or with limits, "<count> <seconds>", among the retained failures.
-- ARGV: limits, then for each: list, envelope, reason. All of them, or none and the reason.

local limits = ARGV[1]
need('stream', 'XLEN', PREFIX .. (limits == '' and 'umbel.dead' or 'umbel.failed'))
unless_full()
for i = 2, #ARGV, 3 do
  local list, envelope, reason = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if limits == '' then
    bury(list, envelope, reason)
  else
    keep(list, envelope, reason, limits)
  end
end
return 1

-- ---- script requeue --------------------------------------------------------------------------------
-- Send a dead letter again. ARGV: the stream, its id there, list, envelope, the list that has the bytes instead ("" or
-- nothing: they are in the letter).   Reply: 1, or 0 if the letter is gone.
-- The letter is removed when its list has taken the message, and not before.

local stream, id, list, envelope, aside = unpack(ARGV)
if #need('stream', 'XRANGE', stream, id, id) == 0 then
  return 0
end
if (aside or '') == '' then
  need('list', 'LPUSH', list, envelope)
else
  need('list', 'LMOVE', aside, list, 'RIGHT', 'LEFT')
  redis.call('ZREM', stream .. '.asides', id .. ' ' .. aside)
end
redis.call('XDEL', stream, id)
return 1
