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

local function store_result(key, payload, ttl)
  local before = redis.call('GET', key)
  if before and is_success(before) then
    return
  end
  if ttl == '0' then
    redis.call('SET', key, payload)
  else
    redis.call('SET', key, payload, 'PX', ttl)
  end
  redis.call('PUBLISH', key, payload)
end
