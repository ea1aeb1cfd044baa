-- batch_keep(id, ep, owner, lease_ms, status, progress): the runner goes on; with a lease of 0 it gives the batch back.
-- Its status only goes forward, and is `cancelling` once that was asked.
-- Answers {ok|fenced|over|gone, 1 if it is to be cancelled, ms to the deadline, negative after it}.
local id, ep, owner, lease, status = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]
local no, st = batch_refusal(id, ep, owner)
if no then return { no, 0, 0 } end
local now = now_ms()
if RANK[status] > RANK[st] then
  redis.call('HSET', batchkey(id), 'st', status)
  redis.call('HSETNX', batchkey(id), 'started', now)
  if status == 'finalizing' then redis.call('HSETNX', batchkey(id), 'finalizing', now) end
end
note_progress(id, ARGV[6])
redis.call('HSET', batchkey(id), 'lease', now + lease)
list_batch(id)
local v = redis.call('HMGET', batchkey(id), 'cx', 'exp')
return { 'ok', tonumber(v[1]), tonumber(v[2]) - now }
