-- What we write in front of an envelope, {"umbel": {...}, and how a message goes back to its list.
-- Found and changed as text: decoding the envelope here would lose what Lua's numbers cannot hold.

local MARK = '{"umbel": {'
local SEP = '\6\22'

local function server_time()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end

local STARTS_MAX = 1000000
local DUE_MAX_S = 1000000000000 -- far beyond the last date there is

local function is_mark(mark)
  local starts, redelivered, due = mark.starts or 0, mark.redelivered or false, mark.not_before or 0
  return type(starts) == 'number' and starts >= 0 and starts <= STARTS_MAX and starts == math.floor(starts)
    and type(redelivered) == 'boolean' and type(due) == 'number' and due >= 0 and due <= DUE_MAX_S
end

-- The envelope without our mark, and the mark. What only looks like a mark is a part of the envelope: whoever
-- opens that finds out.
local function unmarked(envelope)
  if string.sub(envelope, 1, #MARK) ~= MARK then
    return envelope, {}
  end
  local close = string.find(envelope, '}, ', #MARK, true)
  if close then
    local readable, mark = pcall(cjson.decode, string.sub(envelope, #MARK, close))
    if readable and is_mark(mark) then
      return '{' .. string.sub(envelope, close + 3), mark
    end
  end
  return envelope, {}
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
  mark.starts = math.min((mark.starts or 0) + starts, STARTS_MAX)
  if ran and not mark.redelivered then
    mark.redelivered = true
    bare = tell(tell(bare, 'headers'), 'delivery_info')
  end
  return marked(bare, mark)
end

-- "<ticket>:<place>:<list>" names a claimed message and the list it came from.
local function list_of(field)
  return string.match(field, '^[^:]*:[^:]*:(.+)$')
end

local function delayed_of(prefix, list)
  local queue = string.sub(list, #prefix + 1)
  local cut = string.find(queue, SEP, 1, true)
  if cut then
    queue = string.sub(queue, 1, cut - 1)
  end
  return prefix .. 'umbel.delayed.' .. queue
end

-- True, or nil and why not.
local function park(prefix, field, envelope, due)
  local delayed = delayed_of(prefix, list_of(field) or '')
  local _, problem = try('ZADD', delayed, string.format('%.6f', due), field .. '\0' .. envelope)
  if problem then
    return nil, why(problem, delayed, 'zset')
  end
  return true
end

-- Give a message up, with the reason: true, or nil and why not.
local DEAD_MAX = 100000
local function bury(prefix, list, envelope, reason, now)
  local bare, mark = unmarked(envelope)
  local dead = prefix .. 'umbel.dead'
  local _, problem = try('XADD', dead, '*', 'list', list, 'envelope', bare, 'reason', reason,
    'starts', mark.starts or 0, 'at', string.format('%.6f', now))
  if problem then
    return nil, why(problem, dead, 'stream')
  end
  local excess = (try('XLEN', dead) or 0) - DEAD_MAX
  if excess > 0 then
    try('XTRIM', dead, 'MAXLEN', DEAD_MAX)
    try('INCRBY', prefix .. 'umbel.dead.dropped', excess)
  end
  return true
end

-- The end of a message that was refused: true and the reason, or false and both when it cannot be buried.
local function bury_refused(prefix, list, envelope, reason, now)
  local buried, problem = bury(prefix, list, envelope, reason, now)
  if buried then
    return true, reason
  end
  return false, reason .. '; and it cannot be put among the dead letters: ' .. problem
end

-- Push a message to its list, or to the dead letters if that is refused: whether either took it, and the reason.
local function push_or_bury(prefix, command, list, envelope, now)
  if not list then
    return bury_refused(prefix, '', envelope, 'nothing says which queue this came from', now)
  end
  local _, problem = try(command, list, envelope)
  if problem then
    return bury_refused(prefix, list, envelope, why(problem, list, 'list'), now)
  end
  return true
end

-- A member of a queue's delayed set: its list and its envelope. What has another form is taken for a message
-- of the queue, which a worker then gives up.
local function parked_parts(prefix, queue, member)
  local cut = string.find(member, '\0', 1, true)
  local list = cut and list_of(string.sub(member, 1, cut - 1))
  if not list then
    return prefix .. queue, member
  end
  return list, string.sub(member, cut + 1)
end

-- Make ready what is due in one queue: first in line, as it has waited, and earliest due first. How many, or
-- nil and why not.
local DUE_MAX = 1000
local function release(prefix, queue, now)
  local delayed = prefix .. 'umbel.delayed.' .. queue
  local due, problem = try('ZRANGE', delayed, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, DUE_MAX)
  if problem then
    return nil, why(problem, delayed, 'zset')
  end
  for i = #due, 1, -1 do
    local list, envelope = parked_parts(prefix, queue, due[i])
    if not push_or_bury(prefix, 'RPUSH', list, envelope, now) then
      return #due - i
    end
    redis.call('ZREM', delayed, due[i])
  end
  return #due
end

-- What the server handed to an owner and the owner has not adopted goes back, first in line: how many, and
-- how many stay because nobody takes them.
local function unhand(prefix, owner, ran, now)
  local list = try('HGET', prefix .. 'umbel.handing', owner)
  local handed = prefix .. 'umbel.handed.' .. owner
  local count = list and try('LLEN', handed) or 0
  for i = 1, count do
    if not push_or_bury(prefix, 'RPUSH', list, remember(redis.call('LINDEX', handed, -1), 0, ran), now) then
      return i - 1, count - i + 1
    end
    redis.call('RPOP', handed)
  end
  return count, 0
end

-- Put parked messages back into their lists with their time as a mark: how many, at most `limit`.
local function unpark(prefix, queue, limit, now)
  local delayed = prefix .. 'umbel.delayed.' .. queue
  local parked = try('ZRANGE', delayed, 0, limit - 1, 'WITHSCORES') or {}
  for i = 1, #parked, 2 do
    local list, envelope = parked_parts(prefix, queue, parked[i])
    local bare, mark = unmarked(envelope)
    local due = tonumber(parked[i + 1])
    mark.not_before = due >= 0 and due <= DUE_MAX_S and due or nil
    if not push_or_bury(prefix, 'LPUSH', list, marked(bare, mark), now) then
      return (i - 1) / 2
    end
    redis.call('ZREM', delayed, parked[i])
  end
  return #parked / 2
end

local function release_all(prefix, now)
  for _, queue in ipairs(try('SMEMBERS', prefix .. 'umbel.queues') or {}) do
    release(prefix, queue, now)
  end
end

-- Note that an owner spoke. If all were silent for long, the server was away, and nobody is taken
-- for dead before everybody had a lease's time to come back.
local function note_contact(prefix, now, lease)
  local before = tonumber(try('GET', prefix .. 'umbel.contact') or now) or now
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
      keyed[#keyed + 1] = {tonumber(claim or '0', 16), tonumber(place or 0), field}
    end
  end
  table.sort(keyed, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  return keyed
end

-- First in line again. In reverse, because the tail of the list is what is taken first. How many, and how many
-- stay because nobody takes them.
local function put_back(prefix, inflight, fields, ran, now)
  local keyed, count = claimed_order(fields), 0
  for i = #keyed, 1, -1 do
    local field = keyed[i][3]
    local envelope = redis.call('HGET', inflight, field)
    if push_or_bury(prefix, 'RPUSH', list_of(field), remember(envelope, 0, ran), now) then
      redis.call('HDEL', inflight, field)
      count = count + 1
    end
  end
  return count, #keyed - count
end
