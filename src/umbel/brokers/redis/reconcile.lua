-- Compare what an owner holds with the data, which may have been replaced. What the data has as the owner's and
-- the owner does not know (a backup has claims that were settled since) goes back to its list, marked as redelivered.
-- ARGV: prefix, owner, the newest ticket that the owner had given when it was asked, how many names follow of what is
-- under way, those (tickets of claims, fields), then the fields that it surely holds. What was claimed since then, under
-- a newer ticket, is the owner's: this call may come after it, because a script that is not there is sent again.
-- Reply: how many went back, then those of the held fields that the data does not have.

local inflight = ARGV[1] .. 'umbel.inflight.' .. ARGV[2]
need('hash', 'HLEN', inflight)
even_when_full(ARGV[1])
local nonce, newest = string.match(ARGV[3], '^(%x+)%.(%x+)$')
local first_held = 5 + tonumber(ARGV[4])
local known, strays, reply = {}, {}, {0}
for i = 5, #ARGV do
  known[ARGV[i]] = true
  if i >= first_held and redis.call('HEXISTS', inflight, ARGV[i]) == 0 then
    reply[#reply + 1] = ARGV[i]
  end
end
local function is_newer(field)
  local theirs, number = string.match(field, '^(%x+)%.(%x+):')
  return theirs == nonce and tonumber(number, 16) > tonumber(newest, 16)
end

for _, field in ipairs(redis.call('HKEYS', inflight)) do
  if field ~= 'epoch' and not known[field] and not known[string.match(field, '^[^:]*')] and not is_newer(field) then
    strays[#strays + 1] = field
  end
end
reply[1] = put_back(ARGV[1], inflight, strays, true, server_time())
return reply
