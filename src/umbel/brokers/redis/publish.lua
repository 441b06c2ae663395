-- Publish a batch of which some may be for later, as the broker's own side does (clients push as
-- Celery does, and a claim moves aside what is not due).
-- ARGV: prefix, then for each message: list, due (0: now), field, envelope.

local prefix, now = ARGV[1], server_time()
for i = 2, #ARGV, 4 do
  local list, due = ARGV[i], tonumber(ARGV[i + 1])
  if due > now then
    park(prefix, ARGV[i + 2], ARGV[i + 3], due)
  else
    redis.call('LPUSH', list, ARGV[i + 3])
  end
end
return 1
