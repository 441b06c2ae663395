-- Leases. ARGV after the verb: name, then
--   acquire  holder, ttl               Reply: granted, holder, term, left, data
--   read                               Reply: the same
--   renew    holder, term, ttl         Reply: 1 or 0
--   release  holder, term              Reply: 1 or 0
--   update   holder, term, data        Reply: 1 or 0
--   publish  holder, term, keep or change, data, then for each message: list, due, field, envelope
--                                      Reply: 0; or 1, and place from 0, why, ... of what was refused: that is
--                                      among the dead letters

local key = coord .. 'l:' .. ARGV[4]
local record = record_of(need('hash', 'HGETALL', key))
if record then
  record = {
    holder = record.holder or '', term = whole(record.term) and record.term or '0',
    expires_at = tonumber(record.expires_at or 0) or 0, data = record.data or '',
  }
end
local is_held = record ~= nil and record.holder ~= '' and now < record.expires_at

local function reading(granted)
  if not record then
    return {0, '', '0', '0', ''}
  end
  if not is_held then
    return {0, '', record.term, '0', record.data}
  end
  return {granted, record.holder, record.term, instant(record.expires_at - now), record.data}
end

if verb == 'read' then
  return reading(0)
end

if verb == 'acquire' then
  local holder, ttl = ARGV[5], tonumber(ARGV[6])
  if is_held and record.holder ~= holder then
    return reading(0)
  end
  if not is_held then
    born()
    record = {holder = holder, term = next_term(), data = record and record.data or ''}
  end
  redis.call('HSET', key, 'holder', holder, 'term', record.term, 'expires_at', instant(now + ttl), 'data', record.data)
  return {1, holder, record.term, tostring(ttl), record.data}
end

if not is_held or record.holder ~= ARGV[5] or record.term ~= ARGV[6] then
  return 0
end
if verb == 'renew' then
  redis.call('HSET', key, 'expires_at', instant(now + tonumber(ARGV[7])))
elseif verb == 'release' then
  redis.call('HSET', key, 'holder', '', 'expires_at', '0')
elseif verb == 'update' then
  redis.call('HSET', key, 'data', ARGV[7])
else
  unless_full(ARGV[1])
  local reply = {1}
  if ARGV[7] == 'change' then
    redis.call('HSET', key, 'data', ARGV[8])
  end
  for i = 9, #ARGV, 4 do
    local list, due, field, envelope = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]
    local is_there, problem
    if due > now then
      is_there, problem = park(ARGV[1], field, envelope, due)
      if not is_there then
        is_there, problem = bury_refused(ARGV[1], list, envelope, problem, now)
      end
    else
      is_there, problem = push_or_bury(ARGV[1], 'LPUSH', list, envelope, now)
    end
    if problem then
      reply[#reply + 1] = (i - 9) / 4
      reply[#reply + 1] = problem
    end
  end
  return reply
end
return 1
