-- Elections and leases. The decisions are those of src/umbel/protocol/leadership/coordination.py, word for word; a
-- property test compares the two.

-- ---- part coordination -----------------------------------------------------------------------------
-- What elections and leases share: the store's clock, its birth, its terms.
-- ARGV begins with: the time (empty: the server's own; tests set it), verb.

local coord = PREFIX .. '{coord}:'
local meta = coord .. 'meta'
clock = tonumber(ARGV[1])
local now = server_time()
local verb = ARGV[2]

-- A store that was emptied knows its new birth.
local function born()
  need('hash', 'HSETNX', meta, 'born', instant(now))
  return tonumber(redis.call('HGET', meta, 'born')) or now
end

-- Above every term there was, and at least the time, so that terms rise even after a loss of data.
local function next_term()
  local last = whole(need('hash', 'HGET', meta, 'last_term') or 0) or 0
  local term = string.format('%d', math.max(math.floor(now * 1000000), last + 1))
  redis.call('HSET', meta, 'last_term', term)
  return term
end

local function record_of(flat)
  local record = {}
  for i = 1, #flat, 2 do
    record[flat[i]] = flat[i + 1]
  end
  return #flat > 0 and record or nil
end

-- ---- script election (with coordination) -----------------------------------------------------------
-- ARGV after the first two: key, then
--   open    request, policy, asked_at, expires_s                  Reply: the record
--   claim   the same four, holder, ttl                            Reply: granted | busy | closed, ...
--   start | renew   holder, term                                  Reply: 1 or 0
--   finish  holder, term, outcome                                 Reply: 1 or 0
--   read                                                          Reply: the record, or nothing
--   unfinished (the key is empty)  limit                          Reply: key, record, key, record, ...

local name = ARGV[3]
local key, open = coord .. 'e:' .. name, coord .. 'open'
local closed_states = {done = true, failed = true, expired = true}

local function fresh()
  local request, policy, asked_at, expires_s = unpack(ARGV, 4, 7)
  return {
    state = 'open', request = request, policy = policy, asked_at = asked_at, expires_s = expires_s,
    changed_at = instant(now), holder = '', term = '0', attempt = '0', started = '0',
    expires_at = '0', ttl_s = '0', outcome = '',
  }
end

local WORDS = {'state', 'request', 'policy', 'holder', 'started', 'outcome'}
local NUMBERS = {'asked_at', 'expires_s', 'changed_at', 'term', 'attempt', 'expires_at', 'ttl_s'}

-- The record; or nil if a field is missing or a number is none.
local function readable(record)
  for _, field in ipairs(record and WORDS or {}) do
    record = record and record[field] and record
  end
  for _, field in ipairs(record and NUMBERS or {}) do
    record = record and tonumber(record[field] or '') and record
  end
  return record or nil
end

local function put(record)
  local flat = {}
  for _, fields in ipairs({WORDS, NUMBERS}) do
    for _, field in ipairs(fields) do
      flat[#flat + 1] = field
      flat[#flat + 1] = record[field]
    end
  end
  redis.call('HSET', key, unpack(flat))
  redis.call('EXPIRE', key, RETENTION_S)
  if closed_states[record.state] then
    redis.call('ZREM', open, name)
  else
    redis.call('ZADD', open, record.state == 'held' and record.expires_at or record.changed_at, name)
  end
end

local function closed(record, by_me)
  return {'closed', record.state, record.holder, record.term, record.outcome, by_me}
end

local function close(record, state, outcome)
  record.state, record.outcome, record.changed_at = state, outcome, instant(now)
  put(record)
  return closed(record, 1)
end

local function claim(record, holder, ttl)
  local birth = born()
  if not record then
    record = fresh()
    if tonumber(record.asked_at) < birth then
      if record.policy == 'at_most_once' then
        return close(record, 'expired', 'store reset')
      end
      if now < birth + ttl then
        return {'busy', '', '0', instant(birth + ttl - now)}
      end
    end
  end
  if closed_states[record.state] then
    return closed(record, 0)
  end
  if record.state == 'held' and now < tonumber(record.expires_at) then
    if record.holder == holder then -- the reply to its first claim was lost
      return {'granted', record.term, record.attempt}
    end
    return {'busy', record.holder, record.term, instant(tonumber(record.expires_at) - now)}
  end
  local started = record.started == '1'
  if not started and now > tonumber(record.asked_at) + tonumber(record.expires_s) then
    return close(record, 'expired', 'deadline')
  end
  if started and record.policy == 'at_most_once' then
    return close(record, 'failed', 'winner lost after start')
  end
  if tonumber(record.attempt) >= ATTEMPTS_MAX then
    return close(record, 'failed', 'attempts')
  end
  record.state, record.holder, record.term = 'held', holder, next_term()
  record.attempt, record.started = tostring(tonumber(record.attempt) + 1), '0'
  record.expires_at, record.ttl_s = instant(now + ttl), tostring(ttl)
  record.changed_at = instant(now)
  put(record)
  return {'granted', record.term, record.attempt}
end

local function is_holders(record, holder, term)
  return record and record.holder == holder and record.term == term
end

local function renew(record, holder, term, started)
  if not is_holders(record, holder, term) or record.state ~= 'held' or now >= tonumber(record.expires_at) then
    return 0
  end
  record.expires_at, record.changed_at = instant(now + tonumber(record.ttl_s)), instant(now)
  if started then
    record.started = '1'
  end
  put(record)
  return 1
end

-- Work that was done is done, however late it is reported.
local function finish(record, holder, term, outcome)
  if not is_holders(record, holder, term) then
    return 0
  end
  local reported_late = record.state == 'failed' and record.started == '1'
  if record.state ~= 'held' and record.state ~= 'done' and not reported_late then
    return 0
  end
  close(record, 'done', outcome)
  return 1
end

if verb == 'unfinished' then
  local limit, reply = ARGV[4], {}
  for _, found in ipairs(need('zset', 'ZRANGE', open, '-inf', instant(now), 'BYSCORE', 'LIMIT', 0, limit)) do
    local flat = try('HGETALL', coord .. 'e:' .. found) or {}
    if readable(record_of(flat)) then
      reply[#reply + 1] = found
      reply[#reply + 1] = flat
    else
      redis.call('ZREM', open, found) -- its retention is over
    end
  end
  return reply
end

local record = readable(record_of(need('hash', 'HGETALL', key)))
need('zset', 'ZCARD', open)
if verb == 'open' then
  born()
  if not record then
    record = fresh()
    record.asked_at = instant(now) -- the clock of the client may be wrong by days
    put(record)
  end
  return redis.call('HGETALL', key)
elseif verb == 'claim' then
  return claim(record, ARGV[8], tonumber(ARGV[9]))
elseif verb == 'start' then
  return renew(record, ARGV[4], ARGV[5], true)
elseif verb == 'renew' then
  return renew(record, ARGV[4], ARGV[5], false)
elseif verb == 'finish' then
  return finish(record, ARGV[4], ARGV[5], ARGV[6])
end
return record and redis.call('HGETALL', key) or {}

-- ---- script lease (with messages, coordination) ----------------------------------------------------
-- ARGV after the first two: name, then
--   acquire  holder, ttl               Reply: granted, holder, term, left, data
--   read                               Reply: the same
--   renew    holder, term, ttl         Reply: 1 or 0
--   release  holder, term              Reply: 1 or 0
--   update   holder, term, data        Reply: 1 or 0
--   publish  holder, term, keep or change, data, then for each message: list, due, field, envelope
--                                      Reply: 0; or 1, and place from 0, why, ... of messages that were refused:
--                                      they are dead letters

local key = coord .. 'l:' .. ARGV[3]
local record = record_of(need('hash', 'HGETALL', key))
if record then
  record = {
    holder = record.holder or '', term = whole(record.term) and record.term or '0',
    expires_at = tonumber(record.expires_at or 0) or 0, data = record.data or '',
  }
end
local is_held = record ~= nil and record.holder ~= '' and now < record.expires_at

local function reading()
  if not record then
    return {0, '', '0', '0', ''}
  end
  if not is_held then
    return {0, '', record.term, '0', record.data}
  end
  return {0, record.holder, record.term, instant(record.expires_at - now), record.data}
end

if verb == 'read' then
  return reading()
end

if verb == 'acquire' then
  local holder, ttl = ARGV[4], tonumber(ARGV[5])
  if is_held and record.holder ~= holder then
    return reading()
  end
  if not is_held then
    born()
    record = {holder = holder, term = next_term(), data = record and record.data or ''}
  end
  redis.call('HSET', key, 'holder', holder, 'term', record.term, 'expires_at', instant(now + ttl), 'data', record.data)
  return {1, holder, record.term, tostring(ttl), record.data}
end

if not is_held or record.holder ~= ARGV[4] or record.term ~= ARGV[5] then
  return 0
end
if verb == 'renew' then
  redis.call('HSET', key, 'expires_at', instant(now + tonumber(ARGV[6])))
elseif verb == 'release' then
  redis.call('HSET', key, 'holder', '', 'expires_at', '0')
elseif verb == 'update' then
  redis.call('HSET', key, 'data', ARGV[6])
else
  unless_full()
  local FIRST_MESSAGE, reply = 8, {1}
  if ARGV[6] == 'change' then
    redis.call('HSET', key, 'data', ARGV[7])
  end
  for i = FIRST_MESSAGE, #ARGV, 4 do
    local list, due, field, envelope = unpack(ARGV, i, i + 3)
    local is_there, problem
    if tonumber(due) > now then
      is_there, problem = park(field, envelope, tonumber(due))
      if not is_there then
        is_there, problem = bury_refused(list, envelope, problem)
      end
    else
      is_there, problem = push_or_bury('LPUSH', list, envelope)
    end
    if problem then
      reply[#reply + 1] = (i - FIRST_MESSAGE) / 4
      reply[#reply + 1] = problem
    end
  end
  return reply
end
return 1
