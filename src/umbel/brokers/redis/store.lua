
for i = 2, #ARGV, 2 do
  store_result(ARGV[i], ARGV[i + 1], ARGV[1])
end
return #ARGV
