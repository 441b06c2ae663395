-- Who waits for answers: the bindings of reply queues, and until when each is believed to live.
-- ARGV: verb, prefix, exchange, life in seconds, then the members of the exchange's binding set.

local verb, prefix, exchange, life_s = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local bindings, askers = prefix .. '_kombu.binding.' .. exchange, prefix .. 'umbel.askers.' .. exchange
local now = tonumber(redis.call('TIME')[1])
need('zset', 'ZCARD', askers)

local function remove(member)
  try('SREM', bindings, member)
  redis.call('ZREM', askers, member)
  local _, last = string.find(member, SEP .. SEP, 1, true)
  local name = last and string.sub(member, last + 1) or ''
  if string.sub(name, -#exchange - 1) == '.' .. exchange then -- others are not queues of askers
    for _, suffix in ipairs(SUFFIXES) do
      redis.call('DEL', prefix .. name .. suffix)
    end
  end
end

if verb == 'sweep' then
  local over = redis.call('ZRANGEBYSCORE', askers, '-inf', now, 'LIMIT', 0, 1000)
  for _, member in ipairs(over) do
    remove(member)
  end
  return #over
end

for place = 5, #ARGV do
  if verb == 'leave' then
    remove(ARGV[place])
  else
    need('set', 'SADD', bindings, ARGV[place])
    redis.call('ZADD', askers, now + life_s, ARGV[place])
  end
end
if verb == 'enter' then
  -- How long Celery 5.7 leaves the bindings of expiring queues alone, in milliseconds.
  try('ZADD', prefix .. '_kombu.binding_deadlines', 'GT', now * 1000 + 3600000, exchange)
end
return #ARGV - 4
