-- Claims: how an owner takes messages, and how they come back when it does not settle them.
-- An owner is one worker. `umbel.inflight.<owner>` has its claimed messages, and the epoch of that hash: it ends when
-- other workers take the messages back. `umbel.handed.<owner>` has what the server gave to it without a claim.

-- ---- part holding ----------------------------------------------------------------------------------
-- Messages that are due, messages that were handed over, and owners that are alive.

-- The list and the envelope in a member of a queue's set of delayed messages. A member of another form is taken for a
-- message of the queue; the worker that claims it rejects it.
local function parked_parts(queue, member)
  local cut = string.find(member, '\0', 1, true)
  local list = cut and list_of(string.sub(member, 1, cut - 1))
  if not list then
    return PREFIX .. queue, member
  end
  return list, string.sub(member, cut + 1)
end

-- Make ready the delayed messages of a queue that are due. They are first in their lists, because they have waited,
-- the earliest due first. How many, or nil and why not.
local DUE_MAX = 1000
local function release(queue, before_writing)
  local delayed = PREFIX .. 'umbel.delayed.' .. queue
  local due = redis.pcall('ZRANGE', delayed, '-inf', instant(server_time()), 'BYSCORE', 'LIMIT', 0, DUE_MAX)
  if due.err then
    return nil, why(due.err, delayed, 'zset')
  end
  if before_writing and #due > 0 then
    before_writing()
  end
  for i = #due, 1, -1 do
    local list, envelope = parked_parts(queue, due[i])
    if not push_or_bury('RPUSH', list, envelope) then
      return #due - i
    end
    redis.call('ZREM', delayed, due[i])
  end
  return #due
end

-- Return the messages that the server handed to an owner and the owner has not adopted: how many went back, and how
-- many stay because neither list nor dead letters take them. The newest, at the head, is pushed first, so that the
-- oldest is first in its list again.
local function unhand(owner, ran)
  local list = redis.pcall('HGET', PREFIX .. 'umbel.handing', owner)
  local handed = PREFIX .. 'umbel.handed.' .. owner
  local count = type(list) == 'string' and try('LLEN', handed) or 0
  for i = 1, count do
    if not push_or_bury('RPUSH', list, remember(redis.call('LINDEX', handed, 0), 0, ran)) then
      return i - 1, count - i + 1
    end
    redis.call('LPOP', handed)
  end
  return count, 0
end

-- Note that an owner called, before its lease is renewed. If all owners were silent for long, the server was away; then
-- no owner counts as dead until each had the time of a lease to come back. A renewal without a script leaves a trace
-- only among the leases, so the lease that ends last counts, too.
local function note_contact(lease)
  local contact, now = PREFIX .. 'umbel.contact', server_time()
  local before, problem = try('SET', contact, instant(now), 'GET')
  if problem then
    redis.call('SET', contact, instant(now))
  end
  if now - (before and tonumber(before) or now) <= 0.4 * lease then
    return
  end
  local newest = tonumber((try('ZRANGE', PREFIX .. 'umbel.owners', -1, -1, 'WITHSCORES') or {})[2] or 0)
  if now + lease - newest > 0.4 * lease then
    redis.call('SET', PREFIX .. 'umbel.grace', instant(now + lease), 'PX', math.ceil(lease * 1000))
  end
end

-- ---- part returning --------------------------------------------------------------------------------
-- How claimed messages go back to their lists.

-- The fields of an owner's hash in the order in which they were claimed.
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

-- Push the messages back, first in their lists, the last claimed one first, because the tail of a list is taken first.
-- How many went back, and how many stay because neither list nor dead letters take them.
local function put_back(inflight, fields, ran)
  local keyed, count = claimed_order(fields), 0
  for i = #keyed, 1, -1 do
    local field = keyed[i][3]
    local envelope = held(inflight, field)
    if envelope and push_or_bury('RPUSH', list_of(field), remember(envelope, 0, ran)) then
      drop_held(inflight, field)
      count = count + 1
    end
  end
  return count, #keyed - count
end

-- ---- script claim (with messages, holding) ---------------------------------------------------------
-- Take up to `limit` messages for an owner: by priority, in equal shares of the queues, oldest first.
-- ARGV: owner, lease in seconds, ticket, generation, limit, cursor of the revokes, most revokes in the reply, whether
--   to take messages apart (1: they are large), most bytes of an envelope, most bytes of a message (for the reason of
--   a dead letter), queue...
-- Reply: epoch, time, cursor, revokes, complete, queues that cannot be used (queue, why, ...), then for each list:
--   list, first place, "", envelopes; of messages taken apart: list, first place, "+", how many, and the claimer reads
--   them and judges whether they are due; of a message over the limit: list, its bytes, "!", the id of its letter.
-- A claim of an older generation was sent on a connection that was given up since: it takes nothing.

local owner, lease, ticket, generation, limit, revoked_after, page_max, apart, most_bytes, limit_bytes =
  unpack(ARGV, 1, 10)
local FIRST_QUEUE = 11
local PARKED_MAX = 2000 -- messages that are not due, delayed by one claim; the next claim continues
local CHUNK = 1000 -- Lua passes only so many arguments at once
local LOOK = 2 -- messages that are taken first, to see how large they are; a list that has fewer is empty then
local SEARCHED_MAX_BYTES = 32 * 1024 * 1024 -- some 20 ms
local TAKEN_MAX_BYTES = 4 * 1024 * 1024 -- of one claim, and at most LOOK messages more; the next claim continues

lease, limit, most_bytes, apart = tonumber(lease), tonumber(limit), tonumber(most_bytes), apart == '1'
local now = server_time()
local inflight = PREFIX .. 'umbel.inflight.' .. owner

local least = need('hash', 'HGET', PREFIX .. 'umbel.generations', owner)
if least and (tonumber(least) or 0) > tonumber(generation) then
  return {false, instant(now), revoked_after, {}, 1, {}}
end
local epoch = need('hash', 'HGET', inflight, 'epoch')
even_when_full()
note_contact(lease)
need('zset', 'ZADD', PREFIX .. 'umbel.owners', instant(now + lease), owner)
unhand(owner, false)
if not epoch then
  epoch = ticket
  redis.call('HSET', inflight, 'epoch', epoch)
end

local broken = {}
local reply = {epoch, instant(now), revoked_after, {}, 1, broken}
local cursor = redis.pcall('GET', PREFIX .. 'umbel.revokes.cursor')
local newest = type(cursor) == 'string' and whole(cursor)
if cursor and not (newest and newest <= tonumber(revoked_after)) then -- an unreadable cursor says nothing
  local page = try('ZRANGE', PREFIX .. 'umbel.revokes.order', '(' .. revoked_after, '(+inf', 'BYSCORE',
    'LIMIT', 0, page_max, 'WITHSCORES') or {}
  for i = 1, #page, 2 do
    reply[4][#reply[4] + 1] = page[i]
    reply[3] = page[i + 1]
  end
  if #page >= 2 * tonumber(page_max) then
    reply[5] = 0 -- more revokes wait, and no message may overtake them
    return reply
  end
  reply[3] = newest and cursor or reply[3]
end

local function pass_over(queue, reason)
  broken[#broken + 1] = queue
  broken[#broken + 1] = reason
end

local queues = {}
local pauses = PREFIX .. 'umbel.paused'
local some_paused = (try('HLEN', pauses) or 0) > 0
for i = FIRST_QUEUE, #ARGV do
  local released, refused = release(ARGV[i])
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
    for _, part in ipairs({list, first, sign, taken}) do
      reply[#reply + 1] = part
    end
  end
end

-- Free the key of a unique task and the turn under a limit of a message that has ended so, where any message may hold
-- one. The next sweep calls the next message. What a larger message holds is free when its time is over.
local function release_held_by_aside(key, size)
  if size > SEARCHED_MAX_BYTES or try('EXISTS', PREFIX .. 'umbel.holding') ~= 1 then
    return
  end
  local headers = holding_headers(try('LINDEX', key, 0) or '')
  if not headers then
    return
  end
  release_key(headers)
  local bucket = limit_of(headers)
  if bucket and try('ZREM', PREFIX .. 'umbel.slots.' .. bucket, '\n' .. headers.id) == 1 then
    try('ZADD', PREFIX .. 'umbel.limits', 'XX', instant(now), bucket)
  end
end

-- Make a dead letter of a message over the limit. The letter names the list that has its bytes, so that readers of
-- letters do not read them. True; or false if it cannot be done: then the message is taken like any other.
local function set_aside(list, size, move)
  local key = PREFIX .. 'umbel.aside.' .. ticket .. ':' .. #reply
  local reason = 'message refused: it has ' .. size .. ' bytes, over the limit of ' .. limit_bytes
    .. " ('message_max_bytes'); it was not read"
  local id = bury_unread(list, key, size, reason)
  if not id then
    return false
  elseif not move(key) then
    redis.call('XDEL', PREFIX .. 'umbel.dead', id)
    redis.call('ZREM', PREFIX .. 'umbel.dead.asides', id .. ' ' .. key)
    return false
  end
  release_held_by_aside(key, size)
  bytes = bytes + size
  for _, part in ipairs({list, size, '!', id}) do
    reply[#reply + 1] = part
  end
  return true
end

-- Take large messages: the server moves them, and none of them gets into this script. How many, and whether the list is
-- empty now; nil if the server refuses SORT to this user.
local function take_apart(queue, suffix, count)
  local list = PREFIX .. queue .. suffix
  local waiting, problem = try('LLEN', list)
  if problem then
    pass_over(queue, why(problem, list, 'list'))
    return 0, true
  end
  local first, entries, moved, is_refused = place + 1, {}, 0, false
  count = math.min(count, waiting)
  while moved < count and bytes < TAKEN_MAX_BYTES and not is_refused do
    local field = ticket .. ':' .. place + 1 .. '+:' .. list
    local key = apart_key(field)
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

-- Move messages of a list to the owner, and delay those that are not due: how many the owner got, and whether the list
-- is empty now.
local function take(queue, suffix, count)
  if apart then
    local got, emptied = take_apart(queue, suffix, count)
    if got then
      return got, emptied
    end
    apart = false
  end
  local list = PREFIX .. queue .. suffix
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
    if string.byte(envelope, 3) == 117 then -- the "u" of the mark, which most messages do not have
      local _, mark = unmarked(envelope)
      due = mark.not_before
    end
    if is_aside then
      -- it is a dead letter now
    elseif due and due > now and park(ticket .. ':p' .. parked .. ':' .. list, envelope, due) then
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

-- ---- script adopt (with messages, holding) ---------------------------------------------------------
-- Add a message that the server handed to an owner to those that it has claimed.
-- ARGV: owner, epoch, field, size, ending.
-- Reply: 1 if it is claimed, also when this is called again, or 0 if the epoch has ended, and then the message goes on
-- as if it had never been handed over; and how many messages wait in the list that it came from, or -1 if a claim is
-- due in any case: another message was handed over, too, and goes back.
-- The message is known by its size and its ending, where its delivery tag is: a wait that was given up may have been
-- handed another one. The newest is at the head, and mostly alone. An owner with an epoch has a lease, which this does
-- not renew.

local owner, epoch, field, size, ending = unpack(ARGV)
local handed, inflight = PREFIX .. 'umbel.handed.' .. owner, PREFIX .. 'umbel.inflight.' .. owner

local function is_it(envelope)
  return #envelope == tonumber(size) and string.sub(envelope, -#ending) == ending
end

local function left()
  return try('LLEN', list_of(field)) or 0
end

local found = need('hash', 'HMGET', inflight, 'epoch', field)
if found[2] then
  return {1, left()}
end
if found[1] ~= epoch then
  need('list', 'LLEN', handed)
  even_when_full()
  unhand(owner, true)
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
for _, envelope in ipairs(redis.call('LRANGE', handed, 0, -1)) do
  if is_it(envelope) then
    redis.call('HSET', inflight, field, envelope)
    redis.call('LREM', handed, 1, envelope)
    return {1, -1}
  end
end
return {0, 0}

-- ---- script abandon (with messages, returning) -----------------------------------------------------
-- Return what claims took whose replies never came, and refuse these claims if the server has yet to run them.
-- ARGV: owner, generation, ticket...   Reply: how many messages went back.

local owner, generation = unpack(ARGV, 1, 2)
local inflight, generations = PREFIX .. 'umbel.inflight.' .. owner, PREFIX .. 'umbel.generations'
local taken = need('hash', 'HKEYS', inflight)
local least = need('hash', 'HGET', generations, owner)
even_when_full()
if tonumber(generation) > (tonumber(least or 0) or 0) then
  redis.call('HSET', generations, owner, generation)
end
local abandoned, fields = {}, {}
for i = 3, #ARGV do
  abandoned[ARGV[i]] = true
end
for _, field in ipairs(taken) do
  if abandoned[string.match(field, '^[^:]*')] then
    fields[#fields + 1] = field
  end
end
return (put_back(inflight, fields, false))

-- ---- script reconcile (with messages, returning) ---------------------------------------------------
-- Compare the claims of an owner with the data, which may have been replaced. Claims that only the data has (a backup
-- has claims that were settled since) go back to their lists, marked as redelivered.
-- ARGV: owner, the newest ticket that the owner had given when it asked, how many names follow of what is in doubt,
-- these names (tickets of claims, fields), then the fields that it certainly holds. What was claimed since then, under
-- a newer ticket, is the owner's: this call may run after that claim, because an unknown script is sent again.
-- Reply: how many went back, then the held fields that the data does not have.

local owner, newest_ticket, doubtful_count = unpack(ARGV, 1, 3)
local first_held = 4 + tonumber(doubtful_count)
local inflight = PREFIX .. 'umbel.inflight.' .. owner
need('hash', 'HLEN', inflight)
even_when_full()
local nonce, newest = string.match(newest_ticket, '^(%x+)%.(%x+)$')
local known, strays, reply = {}, {}, {0}
for i = 4, #ARGV do
  known[ARGV[i]] = true
  if i >= first_held and redis.call('HEXISTS', inflight, ARGV[i]) == 0 then
    reply[#reply + 1] = ARGV[i]
  end
end
local function is_newer(field)
  local theirs, number = string.match(field, '^(%x+)%.(%x+):')
  return theirs == nonce and tonumber(number, 16) > tonumber(newest, 16)
end

for _, field in ipairs(redis.call('HKEYS', inflight)) do
  if field ~= 'epoch' and not known[field] and not known[string.match(field, '^[^:]*')] and not is_newer(field) then
    strays[#strays + 1] = field
  end
end
reply[1] = put_back(inflight, strays, true)
return reply
