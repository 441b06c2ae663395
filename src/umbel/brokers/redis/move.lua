-- Move waiting messages of one queue to another: first in line first, by priority, then those that are not due.
-- ARGV: prefix, source, target, limit.   Reply: how many; 1 if the next one is signed, which stays.
-- Each keeps its envelope with its mark, its priority and its time, and joins the end of the line.

local prefix, source, target, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local parked, later = prefix .. 'umbel.delayed.' .. source, prefix .. 'umbel.delayed.' .. target
for _, suffix in ipairs(SUFFIXES) do
  need('list', 'LLEN', prefix .. source .. suffix)
  need('list', 'LLEN', prefix .. target .. suffix)
end
need('zset', 'ZCARD', parked)
need('zset', 'ZCARD', later)

-- The body is base64: only headers can hold this name.
local function is_signed(envelope)
  return string.find(envelope, '"umbel_signature"') ~= nil
end

local moved = 0
for _, suffix in ipairs(SUFFIXES) do
  local from, to = prefix .. source .. suffix, prefix .. target .. suffix
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

-- The list that a parked message returns to is in its name: the same one of the other queue.
local function renamed(member)
  local cut = string.find(member, '\0', 1, true)
  local list = cut and list_of(string.sub(member, 1, cut - 1))
  for _, suffix in ipairs(SUFFIXES) do
    if list == prefix .. source .. suffix then
      return string.sub(member, 1, cut - 1 - #list) .. prefix .. target .. suffix .. string.sub(member, cut)
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
