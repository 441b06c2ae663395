-- How messages go back that their owner does not settle, or that no owner waits for.

-- The fields of an in-flight hash in the order in which they were claimed.
local function claimed_order(fields)
  local keyed = {}
  for _, field in ipairs(fields) do
    if field ~= 'epoch' then
      local claim, place = string.match(field, '%.(%x+):(%d+)%+?:')
      keyed[#keyed + 1] = {tonumber(claim or '0', 16), tonumber(place or 0), field}
    end
  end
  table.sort(keyed, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  return keyed
end

-- First in line again. In reverse, because the tail of the list is what is taken first. How many, and how many
-- stay because nobody takes them.
local function put_back(prefix, inflight, fields, ran, now)
  local keyed, count = claimed_order(fields), 0
  for i = #keyed, 1, -1 do
    local field = keyed[i][3]
    local envelope = held(prefix, inflight, field)
    if envelope and push_or_bury(prefix, 'RPUSH', list_of(field), remember(envelope, 0, ran), now) then
      drop_held(prefix, inflight, field)
      count = count + 1
    end
  end
  return count, #keyed - count
end

-- Put parked messages back into their lists with their time as a mark: how many, at most `limit`.
local function unpark(prefix, queue, limit, now)
  local delayed = prefix .. 'umbel.delayed.' .. queue
  local parked = try('ZRANGE', delayed, 0, limit - 1, 'WITHSCORES') or {}
  for i = 1, #parked, 2 do
    local list, envelope = parked_parts(prefix, queue, parked[i])
    local bare, mark = unmarked(envelope)
    local due = tonumber(parked[i + 1])
    mark.not_before = due >= 0 and due <= DUE_MAX_S and due or nil
    if not push_or_bury(prefix, 'LPUSH', list, marked(bare, mark), now) then
      return (i - 1) / 2
    end
    redis.call('ZREM', delayed, parked[i])
  end
  return #parked / 2
end

-- `before_writing` is called before anything is made ready.
local function release_all(prefix, now, before_writing)
  for _, queue in ipairs(try('SMEMBERS', prefix .. 'umbel.queues') or {}) do
    release(prefix, queue, now, before_writing)
  end
end
