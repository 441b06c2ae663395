-- Limits for the whole cluster: which claimed messages may start now, and who waits for whom.
-- ARGV: verb, prefix, lease in seconds, then
--   take   owner, epoch, then for each: field, task id, bucket, most at once (0: by its pace; "ends": it will not
--          start), interval, slack.   Reply: place from 0, why, ... of those that may not start; why is "" when the
--          message waits now, and nil when its claim has ended
--   free   owner, then for each: field, bucket.   The claims have ended, and others may start
--   sweep  the same for claims of which nobody said so, and for calls that nobody answered

local SWEPT_MAX = 500

if ARGV[1] == 'take' then
  local owner, refused = ARGV[4], {}
  local inflight = prefix .. 'umbel.inflight.' .. owner
  local stands = need('hash', 'HGET', inflight, 'epoch') == ARGV[5]
  need('hash', 'HLEN', prefix .. 'umbel.held.' .. owner)
  need('set', 'SCARD', holders)
  need('zset', 'ZCARD', limits)
  for i = 6, #ARGV, 6 do
    local field, task, bucket, most = ARGV[i], ARGV[i + 1], bucket_named(ARGV[i + 2]), ARGV[i + 3]
    local usable, problem = read(bucket)
    local envelope = stands and held(prefix, inflight, field)
    if most == 'ends' then
      if usable and redis.call('ZREM', bucket.slots, call_of(task)) == 1 then
        call(bucket)
        tidy(bucket)
      end
    elseif not usable or not envelope then
      refused[#refused + 1] = (i - 6) / 6
      refused[#refused + 1] = envelope and problem
    else
      redis.call('HSET', bucket.state, 'most', most, 'interval', ARGV[i + 4], 'slack', ARGV[i + 5])
      bucket.most, bucket.interval, bucket.slack = tonumber(most), tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
      local may_start, was_called = start(bucket, owner, field, task)
      if not may_start then
        local entry = #task .. ':' .. task .. field .. '\0' .. envelope
        redis.call(was_called and 'RPUSH' or 'LPUSH', bucket.waiting, entry)
        drop_held(prefix, inflight, field)
        count_waiting(field, 1)
        refused[#refused + 1] = (i - 6) / 6
        refused[#refused + 1] = ''
      end
      call(bucket)
      tidy(bucket)
    end
  end
  return refused
end

if ARGV[1] == 'free' then
  need('hash', 'HLEN', prefix .. 'umbel.held.' .. ARGV[4])
  local called = 0
  for i = 5, #ARGV, 2 do
    called = called + free(bucket_named(ARGV[i + 1]), ARGV[4], ARGV[i])
  end
  return called
end

if ARGV[1] == 'sweep' then
  local called = 0
  for _, owner in ipairs(try('SMEMBERS', holders) or {}) do
    local held = try('HGETALL', prefix .. 'umbel.held.' .. owner) or {}
    for i = 1, #held, 2 do
      if try('HEXISTS', prefix .. 'umbel.inflight.' .. owner, held[i]) ~= 1 then
        called = called + free(bucket_named(held[i + 1]), owner, held[i])
      end
    end
    if #held == 0 then
      redis.call('SREM', holders, owner)
    end
  end
  local quiet = try('ZRANGE', limits, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, SWEPT_MAX) or {}
  for _, name in ipairs(quiet) do
    local bucket = bucket_named(name)
    redis.call('ZADD', limits, string.format('%.6f', now + lease), name)
    if read(bucket) then
      forget_unanswered(bucket)
      called = called + call(bucket)
      tidy(bucket)
    end
  end
  return called
end
