-- Use signatures. ARGV: prefix, then for each: mark, owner, field of the claim, milliseconds to remember it.
-- Reply: the places, from 0, of those that are copies: the claim that used the signature stands, or has ended its
-- message. A claim that neither stands nor has ended was given back, or its owner is gone: then it may be used again.

local prefix, copies = ARGV[1], {}
even_when_full(prefix) -- nothing could run, and so nothing would free memory
for i = 2, #ARGV, 4 do
  local key, owner, field = prefix .. 'umbel.signature.' .. ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local user = need('string', 'GET', key)
  local is_free = not user
  if user then -- empty when its message has ended: then there is no holder
    local holder, held = string.match(user, '^(.-)\n(.*)$')
    is_free = holder and redis.call('HEXISTS', prefix .. 'umbel.inflight.' .. holder, held) == 0
  end
  if is_free then
    redis.call('SET', key, owner .. '\n' .. field, 'PX', ARGV[i + 3])
  else
    copies[#copies + 1] = (i - 2) / 4
  end
end
return copies
