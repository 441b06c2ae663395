-- What the scripts of an owner share: what is due, what was handed over, who was heard of.

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
local function release(prefix, queue, now, before_writing)
  local delayed = prefix .. 'umbel.delayed.' .. queue
  local due = redis.pcall('ZRANGE', delayed, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, DUE_MAX)
  if due.err then
    return nil, why(due.err, delayed, 'zset')
  end
  if before_writing and #due > 0 then
    before_writing()
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
-- how many stay because nobody takes them. The newest, at the head, goes first: the next one goes before it.
local function unhand(prefix, owner, ran, now)
  local list = redis.pcall('HGET', prefix .. 'umbel.handing', owner)
  local handed = prefix .. 'umbel.handed.' .. owner
  local count = type(list) == 'string' and try('LLEN', handed) or 0
  for i = 1, count do
    if not push_or_bury(prefix, 'RPUSH', list, remember(redis.call('LINDEX', handed, 0), 0, ran), now) then
      return i - 1, count - i + 1
    end
    redis.call('LPOP', handed)
  end
  return count, 0
end

-- Note that an owner spoke, before its lease is renewed. If all were silent for long, the server was away, and nobody
-- is taken for dead before everybody had a lease's time to come back. A renewal without a script leaves its trace
-- among the leases alone: the one that ends last tells of it.
local function note_contact(prefix, now, lease)
  local contact = prefix .. 'umbel.contact'
  local before, problem = try('SET', contact, string.format('%.6f', now), 'GET')
  if problem then
    redis.call('SET', contact, string.format('%.6f', now))
  end
  if now - (before and tonumber(before) or now) <= 0.4 * lease then
    return
  end
  local newest = tonumber((try('ZRANGE', prefix .. 'umbel.owners', -1, -1, 'WITHSCORES') or {})[2] or 0)
  if now + lease - newest > 0.4 * lease then
    redis.call('SET', prefix .. 'umbel.grace', string.format('%.6f', now + lease), 'PX', math.ceil(lease * 1000))
  end
end
