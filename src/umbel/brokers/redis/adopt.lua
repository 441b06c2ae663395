-- Take a message that the server handed to an owner among those that it holds.
-- ARGV: prefix, owner, epoch, field, size, end.   Reply: 1 it is held, also when asked again, or 0 the claim no longer
-- stands, and the message goes on as if it had never been handed over; how many wait in the list that it came from,
-- or -1 where a claim is due in any case: something else was handed over too, and goes back.
-- It is known by its size and its end, where its delivery tag is: a wait that was given up may have been
-- handed another one, which is not to be taken for it. The newest is at the head, and mostly alone.
-- Who holds an epoch has a lease; it is not renewed here.

local prefix, owner, field = ARGV[1], ARGV[2], ARGV[4]
local handed, size, ending = ARGV[1] .. 'umbel.handed.' .. ARGV[2], tonumber(ARGV[5]), ARGV[6]
local inflight = prefix .. 'umbel.inflight.' .. owner

local function is_it(envelope)
  return #envelope == size and string.sub(envelope, -#ending) == ending
end

local function left()
  return try('LLEN', list_of(field)) or 0
end

local found = need('hash', 'HMGET', inflight, 'epoch', field)
if found[2] then
  return {1, left()}
end
if found[1] ~= ARGV[3] then
  need('list', 'LLEN', handed)
  even_when_full(prefix)
  unhand(prefix, owner, true, server_time())
  return {0, 0}
end
local newest = need('list', 'LPOP', handed, 2) or {}
if #newest == 1 and is_it(newest[1]) then
  redis.call('HSET', inflight, field, newest[1])
  return {1, left()}
end
for i = #newest, 1, -1 do
  redis.call('LPUSH', handed, newest[i])
end
local envelope = nil
for _, one in ipairs(redis.call('LRANGE', handed, 0, -1)) do
  envelope = is_it(one) and one or envelope
end
if not envelope then
  return {0, 0}
end
redis.call('HSET', inflight, field, envelope)
redis.call('LREM', handed, 1, envelope)
return {1, -1}
