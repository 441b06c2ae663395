-- Elections. ARGV after the verb: key, then
--   open    request, policy, asked_at, expires_s                  Reply: the record
--   claim   the same four, holder, ttl                            Reply: granted | busy | closed, ...
--   start | renew   holder, term                                  Reply: 1 or 0
--   finish  holder, term, outcome                                 Reply: 1 or 0
--   read                                                          Reply: the record, or nothing
--   unfinished (the key is empty)  limit                          Reply: key, record, key, record, ...

local ATTEMPTS_MAX = 5
local RETENTION_S = 86400

local key = coord .. 'e:' .. ARGV[4]
local open = coord .. 'open'
local closed_states = {done = true, failed = true, expired = true}

local function fresh()
  return {
    state = 'open', request = ARGV[5], policy = ARGV[6], asked_at = ARGV[7], expires_s = ARGV[8],
    changed_at = instant(now), holder = '', term = '0', attempt = '0', started = '0',
    expires_at = '0', ttl_s = '0', outcome = '',
  }
end

local WORDS = {'state', 'request', 'policy', 'holder', 'started', 'outcome'}
local NUMBERS = {'asked_at', 'expires_s', 'changed_at', 'term', 'attempt', 'expires_at', 'ttl_s'}

-- A record that lacks something, or has words for a number, is none.
local function readable(record)
  for _, name in ipairs(record and WORDS or {}) do
    record = record and record[name] and record
  end
  for _, name in ipairs(record and NUMBERS or {}) do
    record = record and tonumber(record[name] or '') and record
  end
  return record or nil
end

local function put(record)
  local flat = {}
  for _, names in ipairs({WORDS, NUMBERS}) do
    for _, name in ipairs(names) do
      flat[#flat + 1] = name
      flat[#flat + 1] = record[name]
    end
  end
  redis.call('HSET', key, unpack(flat))
  redis.call('EXPIRE', key, RETENTION_S)
  if closed_states[record.state] then
    redis.call('ZREM', open, ARGV[4])
  else
    redis.call('ZADD', open, record.state == 'held' and record.expires_at or record.changed_at, ARGV[4])
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
    if tonumber(ARGV[7]) < birth then
      if ARGV[6] == 'at_most_once' then
        return close(fresh(), 'expired', 'store reset')
      end
      if now < birth + ttl then
        return {'busy', '', '0', instant(birth + ttl - now)}
      end
    end
    record = fresh()
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

-- What was done is done, however late it is told.
local function finish(record, holder, term, outcome)
  if not is_holders(record, holder, term) then
    return 0
  end
  local told_late = record.state == 'failed' and record.started == '1'
  if record.state ~= 'held' and record.state ~= 'done' and not told_late then
    return 0
  end
  close(record, 'done', outcome)
  return 1
end

if verb == 'unfinished' then
  local reply = {}
  for _, name in ipairs(need('zset', 'ZRANGE', open, '-inf', instant(now), 'BYSCORE', 'LIMIT', 0, ARGV[5])) do
    local flat = try('HGETALL', coord .. 'e:' .. name) or {}
    if readable(record_of(flat)) then
      reply[#reply + 1] = name
      reply[#reply + 1] = flat
    else
      redis.call('ZREM', open, name) -- its retention is over
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
    record.asked_at = instant(now) -- an asker's clock may be wrong by days
    put(record)
  end
  return redis.call('HGETALL', key)
elseif verb == 'claim' then
  return claim(record, ARGV[9], tonumber(ARGV[10]))
elseif verb == 'start' then
  return renew(record, ARGV[5], ARGV[6], true)
elseif verb == 'renew' then
  return renew(record, ARGV[5], ARGV[6], false)
elseif verb == 'finish' then
  return finish(record, ARGV[5], ARGV[6], ARGV[7])
end
return record and redis.call('HGETALL', key) or {}
