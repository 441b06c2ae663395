-- Send a dead letter once more. ARGV: the stream, its id in it, list, envelope.   Reply: 1, or 0: it has gone.
-- The letter goes when its list has taken it, and not before.

if #need('stream', 'XRANGE', ARGV[1], ARGV[2], ARGV[2]) == 0 then
  return 0
end
need('list', 'LPUSH', ARGV[3], ARGV[4])
redis.call('XDEL', ARGV[1], ARGV[2])
return 1
