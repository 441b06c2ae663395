-- The data was replaced under an owner. What it has as the owner's and the owner does not hold (a backup knows
-- claims that were settled since) goes back to its list, marked as redelivered.
-- ARGV: prefix, owner, number of tickets, tickets of claims that are under way, then the fields that it holds.
-- Reply: those of the fields that the data does not have.

even_when_full(ARGV[1])
local inflight = ARGV[1] .. 'umbel.inflight.' .. ARGV[2]
local last_ticket = 3 + tonumber(ARGV[3])
local known, missing, strays = {}, {}, {}
for i = 4, #ARGV do
  known[ARGV[i]] = true
  if i > last_ticket and redis.call('HEXISTS', inflight, ARGV[i]) == 0 then
    missing[#missing + 1] = ARGV[i]
  end
end
for _, field in ipairs(redis.call('HKEYS', inflight)) do
  if not known[field] and not known[string.match(field, '^[^:]*')] then
    strays[#strays + 1] = field
  end
end
put_back(inflight, strays, true)
return missing
