-- requeue(id, ep, resume, token): back to step 1 after a preempt, by compare-and-set on (preempted, ep).
-- Only the sole attachment may resume below what is emitted; everybody else gets `next`. resume -1 asks for next.
-- Answers {ok, epoch, resume} | {lost, epoch, resume with which that epoch began} | {done, ep, nx} | {gone, 0, 0}.
local id, ep, resume, token = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'at', 'nx')
if not v[1] then return { 'gone', 0, 0 } end
if v[1] == 'done' then return { 'done', tonumber(v[2]), tonumber(v[4]) } end
if v[1] ~= 'preempted' or tonumber(v[2]) ~= ep then
  return { 'lost', tonumber(v[2]), number(id, 'rs:' .. v[2]) }
end
if v[3] ~= token then resume = -1 end
local nep, kept = restart(id, v[1], ep, resume)
flush()
return { 'ok', nep, kept }
