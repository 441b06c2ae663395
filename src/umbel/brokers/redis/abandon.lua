-- Give back what claims took whose replies never came, and refuse them if they are still under way.
-- ARGV: prefix, owner, generation, ticket...   Reply: how many messages went back.

local now = server_time()
local inflight = ARGV[1] .. 'umbel.inflight.' .. ARGV[2]
local generations = ARGV[1] .. 'umbel.generations'
local taken = need('hash', 'HKEYS', inflight)
local generation = need('hash', 'HGET', generations, ARGV[2])
even_when_full(ARGV[1])
if tonumber(ARGV[3]) > (tonumber(generation or 0) or 0) then
  redis.call('HSET', generations, ARGV[2], ARGV[3])
end
local abandoned, fields = {}, {}
for i = 4, #ARGV do
  abandoned[ARGV[i]] = true
end
for _, field in ipairs(taken) do
  if abandoned[string.match(field, '^[^:]*')] then
    fields[#fields + 1] = field
  end
end
return (put_back(ARGV[1], inflight, fields, false, now))
