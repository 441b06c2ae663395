-- Publish a batch, all of it or nothing: to several lists, or for later as the broker's own side does (clients
-- push as Celery does, and a claim moves aside what is not due).
-- ARGV: prefix, then for each message: list, due (0: now), field, envelope ("" asks only whether the list takes it).

local prefix, now = ARGV[1], server_time()
local seen = {}
for i = 2, #ARGV, 4 do
  local list, is_later = ARGV[i], tonumber(ARGV[i + 1]) > now
  local key = is_later and delayed_of(prefix, list) or list
  if not seen[key] then
    seen[key] = true
    if is_later then
      need('zset', 'ZCARD', key)
    else
      need('list', 'LLEN', key)
    end
  end
end
unless_full(prefix)
for i = 2, #ARGV, 4 do
  local list, due, field, envelope = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]
  if envelope == '' then
    -- the list was looked at, and that is all
  elseif due > now then
    park(prefix, field, envelope, due)
  else
    redis.call('LPUSH', list, envelope)
  end
end
return 1
