-- Take up to `limit` messages for an owner: by priority, fairly between queues, oldest first.
-- ARGV: prefix, owner, lease, ticket, generation, limit, revoked_after, revoked_page, apart (1: messages are large),
--   the most bytes of an envelope, and of a message, which the reason names, queue...
-- Reply: epoch, now, cursor, revokes, complete, what cannot be taken from (queue, why, ...), then for each list:
-- list, first place, "", envelopes; or, of those that lie apart, list, first place, "+", how many. Who asks reads
-- them, and judges whether they are due. Of a message over the limit: list, its bytes, "!", the id of its letter.
-- A claim of an older generation was sent on a connection given up since: it takes nothing.

local PARKED_MAX = 2000 -- not yet due, moved aside by one claim; the next goes on
local CHUNK = 1000 -- Lua hands over only so many arguments at once
local LOOK = 2 -- popped first, to see how large messages are; a list that has fewer is empty then
local SEARCHED_MAX_BYTES = 32 * 1024 * 1024 -- some 20 ms
local TAKEN_MAX_BYTES = 4 * 1024 * 1024 -- of one claim, and at most LOOK messages more; the next goes on

local prefix, owner, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local ticket, limit, after, apart = ARGV[4], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[9] == '1'
local most_bytes, limit_bytes = tonumber(ARGV[10]), ARGV[11]
local now = server_time()
local inflight = prefix .. 'umbel.inflight.' .. owner

local generation = need('hash', 'HGET', prefix .. 'umbel.generations', owner)
if generation and (tonumber(generation) or 0) > tonumber(ARGV[5]) then
  return {false, string.format('%.6f', now), ARGV[7], {}, 1, {}}
end
local epoch = need('hash', 'HGET', inflight, 'epoch')
even_when_full(prefix)
note_contact(prefix, now, lease)
need('zset', 'ZADD', prefix .. 'umbel.owners', string.format('%.6f', now + lease), owner)
unhand(prefix, owner, false, now)
if not epoch then
  epoch = ticket
  redis.call('HSET', inflight, 'epoch', epoch)
end

local broken = {}
local reply = {epoch, string.format('%.6f', now), ARGV[7], {}, 1, broken}
local cursor = redis.pcall('GET', prefix .. 'umbel.revokes.cursor')
local newest = type(cursor) == 'string' and whole(cursor)
if cursor and not (newest and newest <= after) then -- a cursor that cannot be read says nothing
  local page = try('ZRANGE', prefix .. 'umbel.revokes.order', '(' .. ARGV[7], '(+inf', 'BYSCORE', 'LIMIT', 0, ARGV[8], 'WITHSCORES') or {}
  for i = 1, #page, 2 do
    reply[4][#reply[4] + 1] = page[i]
    reply[3] = page[i + 1]
  end
  if #page >= 2 * tonumber(ARGV[8]) then
    reply[5] = 0 -- more wait, so no message may overtake them
    return reply
  end
  reply[3] = newest and cursor or reply[3]
end

local function pass_over(queue, reason)
  broken[#broken + 1] = queue
  broken[#broken + 1] = reason
end

local queues = {}
local pauses = prefix .. 'umbel.paused'
local some_paused = (try('HLEN', pauses) or 0) > 0
for i = 12, #ARGV do
  local released, refused = release(prefix, ARGV[i], now)
  if some_paused and redis.call('HEXISTS', pauses, ARGV[i]) == 1 then
    -- its messages wait
  elseif released then
    queues[#queues + 1] = ARGV[i]
  else
    pass_over(ARGV[i], refused)
  end
end

local place, parked, bytes = 0, 0, 0

local function note_taken(list, first, sign, taken, entries)
  for i = 1, #entries, CHUNK do
    redis.call('HSET', inflight, unpack(entries, i, math.min(i + CHUNK - 1, #entries)))
  end
  if place >= first then
    reply[#reply + 1] = list
    reply[#reply + 1] = first
    reply[#reply + 1] = sign
    reply[#reply + 1] = taken
  end
end

-- It has ended: free the key of a unique task and a turn under a limit, where any message may hold one. The next
-- sweep calls who waits for the turn. What a larger one holds is free when its time is over.
local function release_held_by_aside(key, size)
  if size > SEARCHED_MAX_BYTES or try('EXISTS', prefix .. 'umbel.holding') ~= 1 then
    return
  end
  local headers = holding_headers(try('LINDEX', key, 0) or '')
  if not headers then
    return
  end
  release_key(prefix, headers)
  if type(headers.task) == 'string' and type(headers.umbel_limit) == 'string' then
    local bucket = headers.task .. ':' .. headers.umbel_limit
    if try('ZREM', prefix .. 'umbel.slots.' .. bucket, '\n' .. headers.id) == 1 then
      try('ZADD', prefix .. 'umbel.limits', 'XX', string.format('%.6f', now), bucket)
    end
  end
end

-- Make a dead letter of a message over the limit. The letter names the list that has its bytes, so that who
-- reads letters does not read them. True; or false: it cannot be, and is taken like any other.
local function set_aside(list, size, move)
  local key = prefix .. 'umbel.aside.' .. ticket .. ':' .. #reply
  local reason = 'message refused: it has ' .. size .. ' bytes, over the limit of ' .. limit_bytes
    .. " ('message_max_bytes'); it was not read"
  local id = bury_unread(prefix, list, key, size, reason, now)
  if not id then
    return false
  elseif not move(key) then
    redis.call('XDEL', prefix .. 'umbel.dead', id)
    redis.call('ZREM', prefix .. 'umbel.dead.asides', id .. ' ' .. key)
    return false
  end
  release_held_by_aside(key, size)
  bytes = bytes + size
  for _, part in ipairs({list, size, '!', id}) do
    reply[#reply + 1] = part
  end
  return true
end

-- The same as `take`, for large messages: the server moves them, and none of them comes in here. Nil: it refuses to
-- SORT for this user.
local function take_apart(queue, suffix, count)
  local list = prefix .. queue .. suffix
  local waiting, problem = try('LLEN', list)
  if problem then
    pass_over(queue, why(problem, list, 'list'))
    return 0, true
  end
  local first, entries, moved, is_refused = place + 1, {}, 0, false
  count = math.min(count, waiting)
  while moved < count and bytes < TAKEN_MAX_BYTES and not is_refused do
    local field = ticket .. ':' .. place + 1 .. '+:' .. list
    local key = apart_key(prefix, field)
    is_refused = not try('SORT', list, 'BY', 'nosort', 'DESC', 'LIMIT', 0, 1, 'STORE', key)
    if not is_refused then
      redis.call('LTRIM', list, 0, -2)
      moved = moved + 1
      local size = try('MEMORY', 'USAGE', key) or TAKEN_MAX_BYTES -- with what the server adds
      if size <= 1.25 * most_bytes + 4096 or not set_aside(list, size, function(to) return try('RENAME', key, to) end) then
        place = place + 1
        bytes = bytes + size
        entries[#entries + 1] = field
        entries[#entries + 1] = ''
      end
    end
  end
  local got = place - first + 1
  note_taken(list, first, '+', got, entries)
  return not is_refused and got or nil, moved == waiting
end

-- Move messages of a list to the owner, and those that are not yet due aside: how many it got, and
-- whether the list is empty now.
local function take(queue, suffix, count)
  if apart then
    local got, emptied = take_apart(queue, suffix, count)
    if got then
      return got, emptied
    end
    apart = false
  end
  local list = prefix .. queue .. suffix
  local fit = place == 0 and LOOK or math.floor((TAKEN_MAX_BYTES - bytes) * place / bytes)
  count = math.min(count, math.max(LOOK, fit))
  local envelopes = redis.pcall('RPOP', list, count)
  if not envelopes then
    return 0, true
  elseif envelopes.err then
    pass_over(queue, why(envelopes.err, list, 'list'))
    return 0, true
  end
  local first, taken, entries = place + 1, {}, {}
  for _, envelope in ipairs(envelopes) do
    local due = nil
    local is_aside = #envelope > most_bytes
      and set_aside(list, #envelope, function(to) return try('LPUSH', to, envelope) end)
    if string.byte(envelope, 3) == 117 then -- the "u" of our mark: most have none
      local _, mark = unmarked(envelope)
      due = mark.not_before
    end
    if is_aside then
      -- it waits for nobody any more
    elseif due and due > now and park(prefix, ticket .. ':p' .. parked .. ':' .. list, envelope, due) then
      parked = parked + 1
    else
      place = place + 1
      bytes = bytes + #envelope
      taken[#taken + 1] = envelope
      entries[#entries + 1] = ticket .. ':' .. place .. ':' .. list
      entries[#entries + 1] = envelope
    end
  end
  note_taken(list, first, '', taken, entries)
  return #taken, #envelopes < count
end

for _, suffix in ipairs(SUFFIXES) do
  local active = queues
  while limit > 0 and #active > 0 and parked < PARKED_MAX and bytes < TAKEN_MAX_BYTES do
    local share, left = math.ceil(limit / #active), {}
    for _, queue in ipairs(active) do
      if limit > 0 and bytes < TAKEN_MAX_BYTES then
        local got, emptied = take(queue, suffix, math.min(share, limit))
        limit = limit - got
        if not emptied then
          left[#left + 1] = queue
        end
      end
    end
    active = left
  end
end
return reply
