-- How full the queues are. ARGV: prefix. Reply: queue, ready, delayed, claimed, waiting for a limit, queue, ...

local prefix = ARGV[1]
local claimed = {}
for _, owner in ipairs(try('ZRANGE', prefix .. 'umbel.owners', 0, -1) or {}) do
  for _, field in ipairs(try('HKEYS', prefix .. 'umbel.inflight.' .. owner) or {}) do
    if field ~= 'epoch' then
      local queue = delayed_of(prefix, list_of(field) or '')
      claimed[queue] = (claimed[queue] or 0) + 1
    end
  end
end
local handing = try('HGETALL', prefix .. 'umbel.handing') or {}
for i = 1, #handing, 2 do
  local queue = delayed_of(prefix, handing[i + 1])
  claimed[queue] = (claimed[queue] or 0) + (try('LLEN', prefix .. 'umbel.handed.' .. handing[i]) or 0)
end
local reply = {}
for _, queue in ipairs(try('SMEMBERS', prefix .. 'umbel.queues') or {}) do
  local ready, delayed = 0, prefix .. 'umbel.delayed.' .. queue
  for _, suffix in ipairs(SUFFIXES) do
    ready = ready + (try('LLEN', prefix .. queue .. suffix) or 0)
  end
  reply[#reply + 1] = queue
  reply[#reply + 1] = ready
  reply[#reply + 1] = try('ZCARD', delayed) or 0
  reply[#reply + 1] = claimed[delayed] or 0
  reply[#reply + 1] = whole(try('HGET', prefix .. 'umbel.waits', queue) or 0) or 0
end
return reply
