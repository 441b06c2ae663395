-- Keys of unique tasks. ARGV: verb, prefix, then
--   hold     key, task id, milliseconds   Reply: the task that holds it now
--   release  key, task id, ...            Reply: how many were given back

local verb, place = ARGV[1], ARGV[2] .. 'umbel.unique.'

if verb == 'hold' then
  local holder = need('string', 'GET', place .. ARGV[3])
  if holder then
    return holder
  end
  note_holding(ARGV[2], tonumber(ARGV[5]))
  redis.call('SET', place .. ARGV[3], ARGV[4], 'PX', ARGV[5])
  return ARGV[4]
end

local released = 0
for i = 3, #ARGV, 2 do
  if try('GET', place .. ARGV[i]) == ARGV[i + 1] then
    released = released + redis.call('DEL', place .. ARGV[i])
  end
end
return released
