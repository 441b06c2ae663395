-- Messages: what all scripts share, and how a message is marked, delayed, pushed, buried or retained.
-- `scripts.py` joins these parts with the scripts that need them. It also defines PREFIX, which is before every key,
-- and SUFFIXES, which follow the name of a queue in the names of its lists.

-- ---- part refusals ---------------------------------------------------------------------------------
-- The server may refuse a command: the key has another type, or the user may not use it. A script that has changed
-- something must go on all the same, so it calls `try`. What a script cannot do without it calls with `need`, before
-- it changes anything.

-- The reply, or nil and the problem.
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    return nil, reply.err
  end
  return reply
end

-- The problem in words that say what to do.
local function why(problem, key, wanted, command)
  local shown = string.gsub(key, '%c', function(c) return string.format('\\x%02x', string.byte(c)) end)
  if string.sub(problem, 1, 9) == 'WRONGTYPE' then
    local found = redis.pcall('TYPE', key).ok or 'value'
    return "the key '" .. shown .. "' holds a " .. found .. ', not a ' .. wanted .. ': delete or rename it'
  end
  return "the key '" .. shown .. "' cannot be used" .. (command and ' by ' .. command or '') .. ': ' .. problem
end

local function need(wanted, command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    error('REFUSED ' .. why(reply.err, key, wanted, command), 0)
  end
  return reply
end

-- A whole number that Lua can count with, or nil.
local function whole(text)
  local number = tonumber(text)
  if number and number >= 0 and number < 9007199254740992 and number == math.floor(number) then
    return number
  end
end

-- At its memory limit the server refuses a script whose first write may need memory. Claims and settles free memory,
-- so they begin with a write that needs none.
local function even_when_full()
  redis.call('DEL', PREFIX .. 'umbel.nothing')
end

-- A script that adds messages begins with a write that changes nothing. The server refuses it if there is no room, or
-- if it takes no writes, and so it does not refuse a later write for such a reason.
local function unless_full()
  redis.call('SETRANGE', PREFIX .. 'umbel.nothing', 0, '')
end

local clock -- the time, read once in each script

local function server_time()
  if not clock then
    local t = redis.call('TIME')
    clock = tonumber(t[1]) + tonumber(t[2]) / 1000000
  end
  return clock
end

local function instant(seconds)
  return string.format('%.6f', seconds)
end

-- ---- part holds ------------------------------------------------------------------------------------
-- What a waiting message holds, by its headers: the key of a unique task, or a turn under a limit. While any message
-- may hold something there is a key `umbel.holding`; without it no script looks into messages.

local function note_holding(ms)
  local key = PREFIX .. 'umbel.holding'
  if (try('PTTL', key) or 0) < ms then
    redis.call('SET', key, '', 'PX', ms)
  end
end

-- The headers of a message that holds something, or nil. They are searched as text first: few messages hold anything,
-- and the body, which may be large, is in the same text.
local function holding_headers(envelope)
  if not string.find(envelope, '_unique"', 1, true) and not string.find(envelope, '_limit"', 1, true) then
    return nil
  end
  local readable, message = pcall(cjson.decode, envelope)
  local headers = readable and type(message) == 'table' and message.headers
  return type(headers) == 'table' and type(headers.id) == 'string' and headers or nil
end

local function release_key(headers)
  if type(headers.umbel_unique) == 'string' then
    local key = PREFIX .. 'umbel.unique.' .. headers.umbel_unique
    if try('GET', key) == headers.id then
      redis.call('DEL', key)
    end
  end
end

-- The bucket of the limit that the message has, or nil.
local function limit_of(headers)
  if type(headers.task) == 'string' and type(headers.umbel_limit) == 'string' then
    return headers.task .. ':' .. headers.umbel_limit
  end
end

-- ---- part messages (with holds) --------------------------------------------------------------------
-- The mark is what Umbel writes in front of an envelope, {"umbel": {...}: how often the message was started, whether
-- it was redelivered, and when it is due. It is found and changed as text, because decoding the envelope here would
-- lose what Lua's numbers cannot represent.

local MARK = '{"umbel": {'
local STARTS_MAX = 1000000
local DUE_MAX_S = 1000000000000 -- far beyond the last date there is

local function is_mark(mark)
  local starts, redelivered, due = mark.starts or 0, mark.redelivered or false, mark.not_before or 0
  return type(starts) == 'number' and starts >= 0 and starts <= STARTS_MAX and starts == math.floor(starts)
    and type(redelivered) == 'boolean' and type(due) == 'number' and due >= 0 and due <= DUE_MAX_S
end

-- The envelope without the mark, and the mark. A text that only looks like a mark is a part of the envelope; the
-- reader of the envelope rejects it.
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
  if #parts == 0 or string.byte(envelope) ~= 123 then -- a text that is no JSON object stays unchanged
    return envelope
  end
  return MARK .. table.concat(parts, ', ') .. '}, ' .. string.sub(envelope, 2)
end

-- Put "redelivered": true into the first object of this name, where Celery looks for it. A quote inside a JSON string
-- is escaped, so the pattern can only match a key.
local function tell(envelope, name)
  local _, brace = string.find(envelope, '"' .. name .. '":%s*{')
  if not brace then
    return envelope
  end
  local rest = string.sub(envelope, brace + 1)
  local comma = string.find(rest, '^%s*}') and '' or ', '
  return string.sub(envelope, 1, brace) .. '"redelivered": true' .. comma .. rest
end

-- Add to the count of starts in the mark, and note whether the message may have run.
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

-- A field of an owner's hash, "<ticket>:<place>:<list>", names a claimed message and the list it came from.
local function list_of(field)
  return string.match(field, '^[^:]*:[^:]*:(.+)$')
end

-- A large message has a "+" behind its place: the owner's hash has only its name, and its envelope is the one element
-- of a separate list. A script takes time for each byte of a text that it gets, and so it does not get this one.
local function is_apart(field)
  return string.find(field, '^[^:]*:%d+%+:') ~= nil
end

local function apart_key(field)
  return PREFIX .. 'umbel.apart.' .. field
end

-- The envelope of a claimed message; false if there is none, or if it cannot be read now. An envelope whose separate
-- list was removed is empty; the worker that takes it buries it.
local function held(inflight, field)
  local envelope = redis.call('HGET', inflight, field)
  if envelope and is_apart(field) then
    local text, problem = try('LINDEX', apart_key(field), 0)
    if problem and string.sub(problem, 1, 9) ~= 'WRONGTYPE' then
      return false
    end
    return text or envelope
  end
  return envelope
end

local function drop_apart(field)
  if is_apart(field) then
    redis.call('UNLINK', apart_key(field))
  end
end

local function drop_held(inflight, field)
  redis.call('HDEL', inflight, field)
  drop_apart(field)
end

-- The set of delayed messages of the queue that has this list.
local function delayed_of(list)
  local queue = string.sub(list, #PREFIX + 1)
  for _, suffix in ipairs(SUFFIXES) do
    if string.sub(queue, -#suffix) == suffix then
      return PREFIX .. 'umbel.delayed.' .. string.sub(queue, 1, -#suffix - 1)
    end
  end
  return PREFIX .. 'umbel.delayed.' .. queue
end

-- Delay a message until it is due: true, or nil and why not.
local function park(field, envelope, due)
  local delayed = delayed_of(list_of(field) or '')
  local _, problem = try('ZADD', delayed, instant(due), field .. '\0' .. envelope)
  if problem then
    return nil, why(problem, delayed, 'zset')
  end
  return true
end

-- Remove the lists of unread messages whose letters are older than the first letter, which made room for newer ones.
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
local function add_letter(stream, most, list, envelope, reason, starts, ...)
  local id, problem = try('XADD', stream, '*', 'list', list, 'envelope', envelope, 'reason', reason,
    'starts', starts, 'at', instant(server_time()), ...)
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
local function put_away(stream, most, list, envelope, reason)
  local bare, mark = unmarked(envelope)
  local id, problem = add_letter(stream, most, list, bare, reason, mark.starts or 0)
  return id and true, problem
end

-- Put a message among the dead letters: true, or nil and why not.
local function bury(list, envelope, reason)
  return put_away(PREFIX .. 'umbel.dead', DEAD_LETTERS_MAX, list, envelope, reason)
end

-- Make a dead letter of a message whose bytes the caller moves to the list `key` afterwards: the letter's id, or nil.
local function bury_unread(list, key, size, reason)
  local stream = PREFIX .. 'umbel.dead'
  local id = add_letter(stream, DEAD_LETTERS_MAX, list, '', reason, 0, 'aside', key, 'size', size)
  if id and not try('ZADD', stream .. '.asides', string.match(id, '^%d+'), id .. ' ' .. key) then
    redis.call('XDEL', stream, id)
    return nil
  end
  return id
end

-- Retain the message of a failed task, as long and as many as the limits, "<count> <seconds>", say.
local function keep(list, envelope, reason, limits)
  local most, seconds = string.match(limits, '^(%d+) (%d+)$')
  local failed = PREFIX .. 'umbel.failed'
  local oldest_ms = math.max(0, (server_time() - tonumber(seconds)) * 1000)
  try('XTRIM', failed, 'MINID', string.format('%.0f', oldest_ms))
  return put_away(failed, tonumber(most), list, envelope, reason)
end

-- Bury a message that was refused: true and the reason, or false and both reasons if it cannot be buried.
local function bury_refused(list, envelope, reason)
  local buried, problem = bury(list, envelope, reason)
  if buried then
    local headers = holding_headers(envelope)
    if headers then
      release_key(headers)
    end
    return true, reason
  end
  return false, reason .. '; and it cannot be put among the dead letters: ' .. problem
end

-- Push a message to its list, or bury it if that is refused: whether either succeeded, and the reason of a refusal.
local function push_or_bury(command, list, envelope)
  if not list then
    return bury_refused('', envelope, 'nothing says which queue this came from')
  end
  local _, problem = try(command, list, envelope)
  if problem then
    return bury_refused(list, envelope, why(problem, list, 'list'))
  end
  return true
end
