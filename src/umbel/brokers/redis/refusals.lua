-- What the server may refuse to a script: a key of another type, a key that the user may not touch. A script
-- that has changed something must go on all the same, so it asks with `try`. What it cannot do without it
-- asks for with `need`, before it changes anything.

-- The reply, or nil and the problem.
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    return nil, reply.err
  end
  return reply
end

-- A problem in words that say what to do.
local function why(problem, key, wanted, command)
  local shown = string.gsub(key, '%c', function(c) return string.format('\\x%02x', string.byte(c)) end)
  if string.sub(problem, 1, 9) == 'WRONGTYPE' then
    local found = redis.pcall('TYPE', key).ok or 'value'
    return "the key '" .. shown .. "' holds a " .. found .. ', not a ' .. wanted .. ': delete or rename it'
  end
  return "the key '" .. shown .. "' cannot be used" .. (command and ' by ' .. command or '') .. ': ' .. problem
end

local function need(wanted, command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    error('REFUSED ' .. why(reply.err, key, wanted, command), 0)
  end
  return reply
end

-- A whole number that Lua can count with, or nil.
local function whole(text)
  local number = tonumber(text)
  if number and number >= 0 and number < 9007199254740992 and number == math.floor(number) then
    return number
  end
end

-- At its memory limit the server refuses a script whose first write may need memory. Claims and
-- settles are what frees memory, so they begin with one that does not.
local function even_when_full(prefix)
  redis.call('DEL', prefix .. 'umbel.nothing')
end

-- What adds messages begins with a write that changes nothing and is refused when there is no room, or when
-- the server takes no writes: later ones are not refused for such a reason.
local function unless_full(prefix)
  redis.call('SETRANGE', prefix .. 'umbel.nothing', 0, '')
end
