-- How full the queues are. ARGV: prefix. Reply: queue, ready, delayed, claimed, queue, ...

local prefix = ARGV[1]
local claimed = {}
for _, owner in ipairs(redis.call('ZRANGE', prefix .. 'umbel.owners', 0, -1)) do
  for _, field in ipairs(redis.call('HKEYS', prefix .. 'umbel.inflight.' .. owner)) do
    if field ~= 'epoch' then
      local queue = delayed_of(prefix, list_of(field))
      claimed[queue] = (claimed[queue] or 0) + 1
    end
  end
end
local handing = redis.call('HGETALL', prefix .. 'umbel.handing')
for i = 1, #handing, 2 do
  local queue = delayed_of(prefix, handing[i + 1])
  claimed[queue] = (claimed[queue] or 0) + redis.call('LLEN', prefix .. 'umbel.handed.' .. handing[i])
end
local reply = {}
for _, queue in ipairs(redis.call('SMEMBERS', prefix .. 'umbel.queues')) do
  local ready, delayed = 0, prefix .. 'umbel.delayed.' .. queue
  for _, suffix in ipairs({'', SEP .. '3', SEP .. '6', SEP .. '9'}) do
    ready = ready + redis.call('LLEN', prefix .. queue .. suffix)
  end
  reply[#reply + 1] = queue
  reply[#reply + 1] = ready
  reply[#reply + 1] = redis.call('ZCARD', delayed)
  reply[#reply + 1] = claimed[delayed] or 0
end
return reply
