-- Put messages among the dead letters. ARGV: prefix, limits, then for each: list, envelope, reason. With limits,
-- "<count> <seconds>", they are failures and are kept as such. All of them, or none and the reason.

local prefix, limits, now = ARGV[1], ARGV[2], server_time()
need('stream', 'XLEN', prefix .. (limits == '' and 'umbel.dead' or 'umbel.failed'))
unless_full(prefix)
for i = 3, #ARGV, 3 do
  if limits == '' then
    bury(prefix, ARGV[i], ARGV[i + 1], ARGV[i + 2], now)
  else
    keep(prefix, ARGV[i], ARGV[i + 1], ARGV[i + 2], now, limits)
  end
end
return 1
