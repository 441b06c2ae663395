-- Take a message that the server handed to an owner among those that it holds.
-- ARGV: prefix, owner, lease, epoch, field, size, end.   Reply: 1 it is held, also when asked again; 0 the
-- claim no longer stands, and the message goes on as if it had never been handed over.
-- It is known by its size and its end, where its delivery tag is: a wait that was given up may have been
-- handed another one, which is not to be taken for it.

local prefix, owner, field = ARGV[1], ARGV[2], ARGV[5]
local handed, size, ending = ARGV[1] .. 'umbel.handed.' .. ARGV[2], tonumber(ARGV[6]), ARGV[7]
local inflight = prefix .. 'umbel.inflight.' .. owner
local now, lease = server_time(), tonumber(ARGV[3])
if need('hash', 'HEXISTS', inflight, field) == 1 then
  return 1
end
local waiting = need('list', 'LRANGE', handed, 0, -1)
even_when_full(prefix)
if redis.call('HGET', inflight, 'epoch') ~= ARGV[4] then
  unhand(prefix, owner, true, now)
  return 0
end
local envelope = nil
for _, one in ipairs(waiting) do
  if #one == size and string.sub(one, -#ending) == ending then
    envelope = one
  end
end
if not envelope then
  return 0
end
note_contact(prefix, now, lease)
need('zset', 'ZADD', prefix .. 'umbel.owners', string.format('%.6f', now + lease), owner)
redis.call('HSET', inflight, field, envelope)
redis.call('LREM', handed, 1, envelope)
return 1
