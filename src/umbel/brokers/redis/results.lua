-- Store results: ARGV: TTL in ms (0: for ever), then key, payload...
-- The first SUCCESS stays. The key is also the channel on which Celery's clients and ours wait.

local function is_success(payload)
  if string.find(payload, '^{%s*"status"%s*:%s*"SUCCESS"') then
    return true
  end
  if string.find(payload, '^{%s*"status"%s*:') then
    return false
  end
  local readable, map = pcall(cjson.decode, payload)
  return readable and type(map) == 'table' and map.status == 'SUCCESS'
end

-- Nothing, or why it was refused. Without `try`: this is done for every task.
local function store_result(key, payload, ttl)
  local reply = redis.pcall('GET', key)
  if type(reply) == 'table' then
    return why(reply.err, key, 'string')
  end
  if reply and is_success(reply) then
    return
  end
  if ttl == '0' then
    reply = redis.pcall('SET', key, payload)
  else
    reply = redis.pcall('SET', key, payload, 'PX', ttl)
  end
  if not reply.err then
    reply = redis.pcall('PUBLISH', key, payload)
  end
  if type(reply) == 'table' then
    return why(reply.err, key, 'string')
  end
end
