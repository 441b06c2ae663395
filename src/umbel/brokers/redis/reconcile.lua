-- Compare what an owner holds with the data, which may have been replaced. What the data has as the owner's and
-- the owner does not know (a backup has claims that were settled since) goes back to its list, marked as redelivered.
-- ARGV: prefix, owner, how many names follow of what is under way, those (tickets of claims, fields), then the
-- fields that it surely holds.
-- Reply: how many went back, then those of the held fields that the data does not have.

local inflight = ARGV[1] .. 'umbel.inflight.' .. ARGV[2]
need('hash', 'HLEN', inflight)
even_when_full(ARGV[1])
local first_held = 4 + tonumber(ARGV[3])
local known, strays, reply = {}, {}, {0}
for i = 4, #ARGV do
  known[ARGV[i]] = true
  if i >= first_held and redis.call('HEXISTS', inflight, ARGV[i]) == 0 then
    reply[#reply + 1] = ARGV[i]
  end
end
for _, field in ipairs(redis.call('HKEYS', inflight)) do
  if not known[field] and not known[string.match(field, '^[^:]*')] then
    strays[#strays + 1] = field
  end
end
reply[1] = put_back(ARGV[1], inflight, strays, true, server_time())
return reply
