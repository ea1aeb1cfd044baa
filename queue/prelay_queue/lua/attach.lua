-- attach(id, token): one more viewer of a job, of which it then needs to know all. A job that is over takes none.
-- Answers {state, form, spec or '', choices, ms to the deadline or 0, ms until it is forgotten or 0}; nil: unknown job.
local id, token = ARGV[1], ARGV[2]
local v = redis.call('HMGET', jobkey(id), 'st', 'vw', 'spec', 'n', 'dl', 'at')
if not v[1] then return false end
if v[1] ~= 'done' then
  local others = without(v[6], function(other) return other == token end)
  redis.call('HSET', jobkey(id), 'at', others == '' and token or others .. ' ' .. token)
  redis.call('ZADD', P .. 'apis', 'NX', now_ms(), string.match(token, '^[^#]+'))
end
local dl = tonumber(v[5]) or 0
return { v[1], v[2] or '', v[3] or '', tonumber(v[4]), dl > 0 and math.max(1, dl - now_ms()) or 0,
  math.max(0, redis.call('PTTL', jobkey(id))) }
