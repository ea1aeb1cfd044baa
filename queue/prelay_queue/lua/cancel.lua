-- cancel(id, token): detach `token`; the job ends when nobody watches any more. token '' ends it at once; a token that
-- is not attached changes nothing (a job without viewers is a batch's, and not ended by a stranger).
-- Answers ended | watched | done | gone.
local id, token = ARGV[1], ARGV[2]
local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'at', 'ow')
if not v[1] then return 'gone' end
if v[1] == 'done' then return 'done' end
if token ~= '' then
  local left, attached = without(v[3], function(other) return other == token end)
  if not attached then return 'watched' end
  redis.call('HSET', jobkey(id), 'at', left)
  if left ~= '' then return 'watched' end
end
abandon(id, v[1], tonumber(v[2]), v[4], 'cancelled')
flush()
return 'ended'
