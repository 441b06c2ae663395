-- The leases of owners. ARGV: verb, prefix, lease in seconds, owner
--   renew   1 if the lease stood (whoever comes late but before others noticed has lost nothing), else 0
--   reap    return what owners hold whose lease has ended, marked as redelivered: how many
--   forget  the same for one owner, at once
-- The reaper also makes ready what is due in queues that no worker of ours consumes.

local prefix, lease, owner = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local owners = prefix .. 'umbel.owners'
local now = server_time()
even_when_full(prefix)

local function forget(name)
  local inflight = prefix .. 'umbel.inflight.' .. name
  local count = put_back(inflight, redis.call('HKEYS', inflight), true)
  redis.call('DEL', inflight)
  redis.call('ZREM', owners, name)
  return count
end

if ARGV[1] == 'forget' then
  redis.call('HDEL', prefix .. 'umbel.generations', owner)
  return forget(owner)
end

note_contact(prefix, now, lease)
if ARGV[1] == 'renew' then
  return 1 - redis.call('ZADD', owners, string.format('%.6f', now + lease), owner)
end

release_all(prefix, now)
if redis.call('EXISTS', prefix .. 'umbel.grace') == 1 then
  return 0
end
local count = 0
for _, name in ipairs(redis.call('ZRANGE', owners, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, 100)) do
  count = count + forget(name)
end
return count
