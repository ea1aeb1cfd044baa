-- evict(id): an operator wants the running attempt given up. The wish stands in the job (`wp`) until its epoch is over,
-- so that it follows a job which is handed over at that very moment: `claim` passes it on to the new owner.
-- Answers {state, owner, epoch}: the owner who was asked, '' when nobody runs it; or {gone, '', 0}.
local id = ARGV[1]
local v = redis.call('HMGET', jobkey(id), 'st', 'ow', 'ep')
if not v[1] then return { 'gone', '', 0 } end
local ep = tonumber(v[3])
if not advance(v[1], 'preempt') then return { v[1], '', ep } end
redis.call('HSET', jobkey(id), 'wp', ep)
control(v[2], 'preempt', id, ep)
return { v[1], v[2], ep }
