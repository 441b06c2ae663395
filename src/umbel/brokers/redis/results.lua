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

-- Nothing, or why it was refused.
local function store_result(key, payload, ttl)
  local before, problem = try('GET', key)
  local _
  if before and is_success(before) then
    return
  end
  if not problem and ttl == '0' then
    _, problem = try('SET', key, payload)
  elseif not problem then
    _, problem = try('SET', key, payload, 'PX', ttl)
  end
  if not problem then
    _, problem = try('PUBLISH', key, payload)
  end
  return problem and why(problem, key, 'string')
end
