-- Remove messages that wait in a queue, a portion at a time, and free what they hold.
-- ARGV: verb, prefix, lease in seconds, queue, then
--   limited  bucket, ...   those that wait for these limits.   Reply: how many; how many of the buckets are done
--   rest                   all others.   Reply: how many; 1 if there may be more
-- Where no message can hold anything the lists go as they are, which takes the server no time.

local PORTION, PORTION_BYTES = 500, 1000000 -- a few milliseconds
local CHUNK = 1000

local queue, removed, bytes = ARGV[4], 0, 0

local function is_full()
  return removed >= PORTION or bytes >= PORTION_BYTES
end

local function remove(envelope)
  removed = removed + 1
  bytes = bytes + #envelope
  local headers = holding_headers(envelope)
  if not headers then
    return
  end
  release_key(prefix, headers)
  if type(headers.task) ~= 'string' or type(headers.umbel_limit) ~= 'string' then
    return
  end
  local bucket = bucket_named(headers.task .. ':' .. headers.umbel_limit)
  if try('ZREM', bucket.slots, call_of(headers.id)) == 1 and read(bucket) then -- it was its turn
    call(bucket)
    tidy(bucket)
  end
end

-- The line has messages of other queues too, which keep their order: it is written anew, at once.
local function remove_among_others(bucket)
  local others = {}
  for _, entry in ipairs(redis.call('LRANGE', bucket.waiting, 0, -1)) do
    local _, field, envelope = parts_of(entry)
    if queue_of(field) == queue then
      count_waiting(field, -1)
      remove(envelope)
    else
      others[#others + 1] = entry
    end
  end
  redis.call('DEL', bucket.waiting)
  for i = 1, #others, CHUNK do
    redis.call('RPUSH', bucket.waiting, unpack(others, i, math.min(i + CHUNK - 1, #others)))
  end
end

local function remove_waiting(bucket)
  while not is_full() do
    local entry = redis.call('RPOP', bucket.waiting)
    if not entry then
      return
    end
    local _, field, envelope = parts_of(entry)
    if queue_of(field) ~= queue then
      redis.call('RPUSH', bucket.waiting, entry)
      remove_among_others(bucket)
      return
    end
    count_waiting(field, -1)
    remove(envelope)
  end
end

if ARGV[1] == 'limited' then
  for i = 5, #ARGV do
    local bucket = bucket_named(ARGV[i])
    if read(bucket) then
      remove_waiting(bucket)
      tidy(bucket)
    end
    if is_full() then
      return {removed, i - 5}
    end
  end
  return {removed, #ARGV - 4}
end

local lists, delayed = {}, prefix .. 'umbel.delayed.' .. queue
for i, suffix in ipairs(SUFFIXES) do
  lists[i] = prefix .. queue .. suffix
end
if redis.call('EXISTS', prefix .. 'umbel.holding') == 0 then
  for _, list in ipairs(lists) do
    removed = removed + (try('LLEN', list) or 0)
  end
  removed = removed + (try('ZCARD', delayed) or 0)
else
  for _, list in ipairs(lists) do
    local envelope = not is_full() and try('RPOP', list)
    while envelope do
      remove(envelope)
      envelope = not is_full() and try('RPOP', list)
    end
  end
  local popped = not is_full() and try('ZPOPMIN', delayed)
  while popped and popped[1] do
    remove(string.sub(popped[1], (string.find(popped[1], '\0', 1, true) or 0) + 1))
    popped = not is_full() and try('ZPOPMIN', delayed)
  end
  if is_full() then
    return {removed, 1}
  end
end
redis.call('UNLINK', delayed, unpack(lists)) -- of whatever type somebody has made them
return {removed, 0}
