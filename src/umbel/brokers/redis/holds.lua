-- What a message that waits holds in the data, by its headers: the key of a unique task, a turn under a limit.
-- While any message may hold one there is a key `umbel.holding`; without it nobody need look into messages.

local function note_holding(prefix, ms)
  local key = prefix .. 'umbel.holding'
  if (try('PTTL', key) or 0) < ms then
    redis.call('SET', key, '', 'PX', ms)
  end
end

-- The headers of a message that holds something, or nil. Found as text first: few messages do, and the body,
-- which may be large, is in the same text.
local function holding_headers(envelope)
  if not string.find(envelope, '_unique"', 1, true) and not string.find(envelope, '_limit"', 1, true) then
    return nil
  end
  local readable, message = pcall(cjson.decode, envelope)
  local headers = readable and type(message) == 'table' and message.headers
  return type(headers) == 'table' and type(headers.id) == 'string' and headers or nil
end

local function release_key(prefix, headers)
  if type(headers.umbel_unique) == 'string' then
    local key = prefix .. 'umbel.unique.' .. headers.umbel_unique
    if try('GET', key) == headers.id then
      redis.call('DEL', key)
    end
  end
end
