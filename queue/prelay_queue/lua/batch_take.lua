-- batch_take(id, owner, lease_ms, floor): the right to run a batch, for one runner at a time. A new owner begins the next
-- epoch, above `floor`: after a failover Redis may have forgotten one whose runner wrote to disk. The same owner again
-- gets the epoch that it has.
-- Answers {ok, epoch, 0} | {held, epoch, ms that the lease of another has left} | {over|gone, epoch, 0}.
local id, owner, lease, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), now_ms()
local v = redis.call('HMGET', batchkey(id), 'st', 'ep', 'ow', 'lease')
if not v[1] then return { 'gone', 0, 0 } end
local ep, left = tonumber(v[2]), tonumber(v[4]) - now
if OVER[v[1]] then return { 'over', ep, 0 } end
if v[3] ~= owner then
  if v[3] ~= '' and left > 0 then return { 'held', ep, left } end
  ep = math.max(ep, tonumber(ARGV[4])) + 1
end
redis.call('HSET', batchkey(id), 'ep', ep, 'ow', owner, 'lease', now + lease)
list_batch(id)
return { 'ok', ep, 0 }
