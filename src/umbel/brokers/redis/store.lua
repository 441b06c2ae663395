-- ARGV: prefix, TTL in ms (0: for ever), then key, payload...   Reply: place from 0, why, ... of what was refused.

unless_full(ARGV[1])
local refused = {}
for i = 3, #ARGV, 2 do
  local problem = store_result(ARGV[i], ARGV[i + 1], ARGV[2])
  if problem then
    refused[#refused + 1] = (i - 3) / 2
    refused[#refused + 1] = problem
  end
end
return refused
