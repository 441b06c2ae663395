-- Use signatures. ARGV: prefix, the cluster's id ("": nobody asks for it), then for each: mark, owner, field of
-- the claim, milliseconds to remember it.
-- Reply: the places, from 0, of those that are copies: the claim that used the signature stands, or has ended its
-- message. A claim that neither stands nor has ended was given back, or its owner is gone: then it may be used again.
-- A text instead: the id that is there; without the right one, what was used may be lost too, and nothing is used.

local prefix, cluster, copies = ARGV[1], ARGV[2], {}
if cluster ~= '' then
  local stored = need('string', 'GET', prefix .. 'umbel.cluster') or ''
  local found = string.match(stored, '^%S+ (.*)$') or ''
  if found ~= cluster then
    return found
  end
end
even_when_full(prefix) -- nothing could run, and so nothing would free memory
for i = 3, #ARGV, 4 do
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
    copies[#copies + 1] = (i - 3) / 4
  end
end
return copies
