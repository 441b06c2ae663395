-- What elections and leases share: the store's clock, its birth, its terms. The decisions are those of
-- src/umbel/protocol/leadership/coordination.py, word for word; a property test holds the two together.
-- ARGV begins with: prefix, now (empty: the server's own clock; tests set it), verb.

local coord = ARGV[1] .. '{coord}:'
local meta = coord .. 'meta'
local now, now_us
if ARGV[2] == '' then
  local t = redis.call('TIME')
  now, now_us = tonumber(t[1]) + tonumber(t[2]) / 1000000, tonumber(t[1]) * 1000000 + tonumber(t[2])
else
  now = tonumber(ARGV[2])
  now_us = math.floor(now * 1000000)
end
local verb = ARGV[3]

local function instant(seconds)
  return string.format('%.6f', seconds)
end

-- A store that was emptied knows its new birth.
local function born()
  need('hash', 'HSETNX', meta, 'born', instant(now))
  return tonumber(redis.call('HGET', meta, 'born')) or now
end

-- Above every term there was, and at least the time, so that terms rise even after a loss.
local function next_term()
  local term = math.max(now_us, (whole(need('hash', 'HGET', meta, 'last_term') or 0) or 0) + 1)
  redis.call('HSET', meta, 'last_term', string.format('%d', term))
  return string.format('%d', term)
end

local function record_of(flat)
  local record = {}
  for i = 1, #flat, 2 do
    record[flat[i]] = flat[i + 1]
  end
  return #flat > 0 and record or nil
end

