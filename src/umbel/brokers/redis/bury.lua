-- Put messages among the dead letters. ARGV: prefix, then for each: list, envelope, reason.
-- All of them, or none and the reason.

local now, dead = server_time(), ARGV[1] .. 'umbel.dead'
need('stream', 'XLEN', dead)
unless_full(ARGV[1])
for i = 2, #ARGV, 3 do
  bury(ARGV[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], now)
end
return 1
