-- Send a dead letter once more. ARGV: the stream, its id in it, list, envelope, the list that has the bytes instead
-- ("" or none: they are in the letter).   Reply: 1, or 0: it has gone.
-- The letter goes when its list has taken it, and not before.

if #need('stream', 'XRANGE', ARGV[1], ARGV[2], ARGV[2]) == 0 then
  return 0
end
if (ARGV[5] or '') == '' then
  need('list', 'LPUSH', ARGV[3], ARGV[4])
else
  need('list', 'LMOVE', ARGV[5], ARGV[3], 'RIGHT', 'LEFT')
  redis.call('ZREM', ARGV[1] .. '.asides', ARGV[2] .. ' ' .. ARGV[5])
end
redis.call('XDEL', ARGV[1], ARGV[2])
return 1
