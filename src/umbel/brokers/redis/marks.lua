-- What we write in front of an envelope, {"umbel": {...}, and how a message goes back to its list.
-- Found and changed as text: decoding the envelope here would lose what Lua's numbers cannot hold.

local MARK = '{"umbel": {'
local SEP = '\6\22'

local function server_time()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end

-- At its memory limit the server refuses a script whose first write may need memory. Claims and
-- settles are what frees memory, so they begin with one that does not.
local function even_when_full(prefix)
  redis.call('DEL', prefix .. 'umbel.nothing')
end

-- The envelope without our mark, and the mark.
local function unmarked(envelope)
  if string.sub(envelope, 1, #MARK) ~= MARK then
    return envelope, {}
  end
  local close = string.find(envelope, '}', #MARK, true)
  local mark = cjson.decode(string.sub(envelope, #MARK, close))
  return '{' .. string.sub(envelope, close + 3), mark
end

local function marked(envelope, mark)
  local parts = {}
  if (mark.starts or 0) > 0 then
    parts[#parts + 1] = string.format('"starts": %d', mark.starts)
  end
  if mark.redelivered then
    parts[#parts + 1] = '"redelivered": true'
  end
  if mark.not_before then
    parts[#parts + 1] = string.format('"not_before": %.6f', mark.not_before)
  end
  if #parts == 0 or string.byte(envelope) ~= 123 then -- what is no JSON map stays as it is
    return envelope
  end
  return MARK .. table.concat(parts, ', ') .. '}, ' .. string.sub(envelope, 2)
end

-- Put "redelivered": true into the first map of this name, where Celery looks for it. A quote
-- inside a JSON string is escaped, so the pattern can only meet a key.
local function tell(envelope, name)
  local _, brace = string.find(envelope, '"' .. name .. '":%s*{')
  if not brace then
    return envelope
  end
  local rest = string.sub(envelope, brace + 1)
  local comma = string.find(rest, '^%s*}') and '' or ', '
  return string.sub(envelope, 1, brace) .. '"redelivered": true' .. comma .. rest
end

local function remember(envelope, starts, ran)
  if starts == 0 and not ran then
    return envelope
  end
  local bare, mark = unmarked(envelope)
  mark.starts = (mark.starts or 0) + starts
  if ran and not mark.redelivered then
    mark.redelivered = true
    bare = tell(tell(bare, 'headers'), 'delivery_info')
  end
  return marked(bare, mark)
end

-- "<ticket>:<place>:<list>" names a claimed message and the list it came from.
local function list_of(field)
  return string.match(field, '^[^:]*:[^:]*:(.*)$')
end

local function delayed_of(prefix, list)
  local queue = string.sub(list, #prefix + 1)
  local cut = string.find(queue, SEP, 1, true)
  if cut then
    queue = string.sub(queue, 1, cut - 1)
  end
  return prefix .. 'umbel.delayed.' .. queue
end

local function park(prefix, field, envelope, due)
  redis.call('ZADD', delayed_of(prefix, list_of(field)), string.format('%.6f', due), field .. '\0' .. envelope)
end

-- Make ready what is due in one queue: first in line, as it has waited, and earliest due first.
local DUE_MAX = 1000
local function release(delayed, now)
  local due = redis.call('ZRANGE', delayed, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, DUE_MAX)
  for i = #due, 1, -1 do
    local cut = string.find(due[i], '\0', 1, true)
    redis.call('RPUSH', list_of(string.sub(due[i], 1, cut - 1)), string.sub(due[i], cut + 1))
    redis.call('ZREM', delayed, due[i])
  end
  return #due
end

-- What the server handed to an owner and the owner has not adopted goes back, first in line.
local function unhand(prefix, owner, ran)
  local list = redis.call('HGET', prefix .. 'umbel.handing', owner)
  local handed, count = prefix .. 'umbel.handed.' .. owner, 0
  local envelope = list and redis.call('RPOP', handed)
  while envelope do
    redis.call('RPUSH', list, remember(envelope, 0, ran))
    count = count + 1
    envelope = redis.call('RPOP', handed)
  end
  return count
end

-- Put parked messages back into their lists with their time as a mark: how many, at most `limit`.
local function unpark(delayed, limit)
  local parked = redis.call('ZRANGE', delayed, 0, limit - 1, 'WITHSCORES')
  for i = 1, #parked, 2 do
    local cut = string.find(parked[i], '\0', 1, true)
    local bare, mark = unmarked(string.sub(parked[i], cut + 1))
    mark.not_before = tonumber(parked[i + 1])
    redis.call('LPUSH', list_of(string.sub(parked[i], 1, cut - 1)), marked(bare, mark))
    redis.call('ZREM', delayed, parked[i])
  end
  return #parked / 2
end

local function release_all(prefix, now)
  local count = 0
  for _, queue in ipairs(redis.call('SMEMBERS', prefix .. 'umbel.queues')) do
    count = count + release(prefix .. 'umbel.delayed.' .. queue, now)
  end
  return count
end

-- Note that an owner spoke. If all were silent for long, the server was away, and nobody is taken
-- for dead before everybody had a lease's time to come back.
local function note_contact(prefix, now, lease)
  local before = tonumber(redis.call('GET', prefix .. 'umbel.contact') or now)
  redis.call('SET', prefix .. 'umbel.contact', string.format('%.6f', now))
  if now - before > 0.4 * lease then
    redis.call('SET', prefix .. 'umbel.grace', string.format('%.6f', now + lease), 'PX', math.ceil(lease * 1000))
  end
end

-- The fields of an in-flight hash in the order in which they were claimed.
local function claimed_order(fields)
  local keyed = {}
  for _, field in ipairs(fields) do
    if field ~= 'epoch' then
      local claim, place = string.match(field, '%.(%x+):(%d+):')
      keyed[#keyed + 1] = {tonumber(claim, 16), tonumber(place), field}
    end
  end
  table.sort(keyed, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  return keyed
end

-- First in line again. In reverse, because the tail of the list is what is taken first.
local function put_back(inflight, fields, ran)
  local keyed = claimed_order(fields)
  for i = #keyed, 1, -1 do
    local field = keyed[i][3]
    local envelope = redis.call('HGET', inflight, field)
    redis.call('HDEL', inflight, field)
    redis.call('RPUSH', list_of(field), remember(envelope, 0, ran))
  end
  return #keyed
end

