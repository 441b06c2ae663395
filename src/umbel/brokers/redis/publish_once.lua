-- Publish a batch, all of it or nothing, without the messages whose ids were published lately.
-- ARGV: prefix, milliseconds to remember an id, then for each message: id, list, envelope. One that goes to several
-- lists comes once for each. Reply: how many were pushed.

local prefix, remembered_ms, seen = ARGV[1], ARGV[2], {}
for i = 3, #ARGV, 3 do
  local list = ARGV[i + 1]
  if not seen[list] then
    seen[list] = true
    need('list', 'LLEN', list)
  end
end
unless_full(prefix)
local is_new, pushed = {}, 0
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  if is_new[id] == nil then
    is_new[id] = redis.call('SET', prefix .. 'umbel.sent.' .. id, '', 'NX', 'PX', remembered_ms) and true or false
  end
  if is_new[id] then
    redis.call('LPUSH', ARGV[i + 1], ARGV[i + 2])
    pushed = pushed + 1
  end
end
return pushed
