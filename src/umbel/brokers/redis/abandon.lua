-- Give back what claims took whose replies never came, and refuse them if they are still under way.
-- ARGV: prefix, owner, generation, ticket...   Reply: how many messages went back.

even_when_full(ARGV[1])
local inflight = ARGV[1] .. 'umbel.inflight.' .. ARGV[2]
local generations = ARGV[1] .. 'umbel.generations'
if tonumber(ARGV[3]) > tonumber(redis.call('HGET', generations, ARGV[2]) or 0) then
  redis.call('HSET', generations, ARGV[2], ARGV[3])
end
local abandoned, fields = {}, {}
for i = 4, #ARGV do
  abandoned[ARGV[i]] = true
end
for _, field in ipairs(redis.call('HKEYS', inflight)) do
  if abandoned[string.match(field, '^[^:]*')] then
    fields[#fields + 1] = field
  end
end
return put_back(inflight, fields, false)
