-- disown(prefix): the workers whose incarnation begins with `prefix` are known to be dead (their parent saw them end).
-- Their leases end now instead of by time, and their heartbeats go. The sweep does the rest. Answers how many leases.
local ended, now = 0, now_ms()
local function dead(worker) return string.sub(worker, 1, #ARGV[1]) == ARGV[1] end
if ARGV[1] == '' then return 0 end
for _, worker in ipairs(redis.call('ZRANGE', P .. 'workers', 0, -1)) do
  if dead(worker) then
    redis.call('DEL', P .. 'worker:' .. worker, P .. 'ctl:' .. worker)
    redis.call('ZREM', P .. 'workers', worker)
  end
end
for _, id in ipairs(redis.call('ZRANGE', P .. 'leases', 0, -1)) do
  if dead(field(id, 'ow') or '') then
    redis.call('ZADD', P .. 'leases', now, id)
    ended = ended + 1
  end
end
return ended
