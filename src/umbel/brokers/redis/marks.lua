-- What we write in front of an envelope, {"umbel": {...}, and how a message goes back to its list.
-- Found and changed as text: decoding the envelope here would lose what Lua's numbers cannot hold.

local MARK = '{"umbel": {'

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

-- The envelope without our mark, and the mark. What only looks like a mark is a part of the envelope; the
-- reader of the envelope finds out.
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

-- A message that lies apart has a "+" behind its place: the owner's hash names it, and its envelope is the one
-- element of a list. A script takes time for each byte of a text that it gets, and a large one need not pass.
local function is_apart(field)
  return string.find(field, '^[^:]*:%d+%+:') ~= nil
end

local function apart_key(prefix, field)
  return prefix .. 'umbel.apart.' .. field
end

-- The envelope of a claimed message; false: there is none, or it may not be read now. One whose text somebody
-- has removed is empty, and is buried by who takes it.
local function held(prefix, inflight, field)
  local envelope = redis.call('HGET', inflight, field)
  if envelope and is_apart(field) then
    local text, problem = try('LINDEX', apart_key(prefix, field), 0)
    if problem and string.sub(problem, 1, 9) ~= 'WRONGTYPE' then
      return false
    end
    return text or envelope
  end
  return envelope
end

local function drop_apart(prefix, field)
  if is_apart(field) then
    redis.call('UNLINK', apart_key(prefix, field))
  end
end

local function drop_held(prefix, inflight, field)
  redis.call('HDEL', inflight, field)
  drop_apart(prefix, field)
end

local function delayed_of(prefix, list)
  local queue = string.sub(list, #prefix + 1)
  for _, suffix in ipairs(SUFFIXES) do
    if string.sub(queue, -#suffix) == suffix then
      return prefix .. 'umbel.delayed.' .. string.sub(queue, 1, -#suffix - 1)
    end
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

-- The bytes of messages that were set aside go with their letters: those before the first letter are gone.
local function drop_asides(stream)
  local asides = stream .. '.asides'
  if (try('ZCARD', asides) or 0) == 0 then
    return
  end
  local first = (try('XRANGE', stream, '-', '+', 'COUNT', 1) or {{'0-0'}})[1]
  local first_ms, first_number = string.match(first[1], '^(%d+)-(%d+)$')
  for _, member in ipairs(try('ZRANGE', asides, '-inf', first_ms, 'BYSCORE') or {}) do
    local ms, number, key = string.match(member, '^(%d+)-(%d+) (.+)$')
    if ms ~= first_ms or tonumber(number) < tonumber(first_number) then
      redis.call('UNLINK', key)
      redis.call('ZREM', asides, member)
    end
  end
end

-- Add a letter to a stream; the oldest make room: its id, or nil and why not.
local function add_letter(stream, most, ...)
  local id, problem = try('XADD', stream, '*', ...)
  if problem then
    return nil, why(problem, stream, 'stream')
  end
  local excess = (try('XLEN', stream) or 0) - most
  if excess > 0 then
    try('XTRIM', stream, 'MAXLEN', most)
    try('INCRBY', stream .. '.dropped', excess)
    drop_asides(stream)
  end
  return id
end

-- Put a message into a stream of letters, with the reason: true, or nil and why not.
local function put_away(stream, most, list, envelope, reason, now)
  local bare, mark = unmarked(envelope)
  local id, problem = add_letter(stream, most, 'list', list, 'envelope', bare, 'reason', reason,
    'starts', mark.starts or 0, 'at', string.format('%.6f', now))
  if not id then
    return nil, problem
  end
  return true
end

-- Give a message up: true, or nil and why not.
local DEAD_MAX = 100000
local function bury(prefix, list, envelope, reason, now)
  return put_away(prefix .. 'umbel.dead', DEAD_MAX, list, envelope, reason, now)
end

-- Give a message up whose bytes lie in the list `key` once this has returned: the id of its letter, or nil.
local function bury_unread(prefix, list, key, size, reason, now)
  local stream = prefix .. 'umbel.dead'
  local id = add_letter(stream, DEAD_MAX, 'list', list, 'envelope', '', 'reason', reason,
    'starts', 0, 'at', string.format('%.6f', now), 'aside', key, 'size', size)
  if id and not try('ZADD', stream .. '.asides', string.match(id, '^%d+'), id .. ' ' .. key) then
    redis.call('XDEL', stream, id)
    return nil
  end
  return id
end

-- Keep the message of a failed task, as long and as many as the limits, "<count> <seconds>", say.
local function keep(prefix, list, envelope, reason, now, limits)
  local most, seconds = string.match(limits, '^(%d+) (%d+)$')
  local failed = prefix .. 'umbel.failed'
  try('XTRIM', failed, 'MINID', string.format('%.0f', math.max(0, (now - tonumber(seconds)) * 1000)))
  return put_away(failed, tonumber(most), list, envelope, reason, now)
end

-- The end of a message that was refused: true and the reason, or false and both when it cannot be buried.
local function bury_refused(prefix, list, envelope, reason, now)
  local buried, problem = bury(prefix, list, envelope, reason, now)
  if buried then
    local headers = holding_headers(envelope)
    if headers then
      release_key(prefix, headers)
    end
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
