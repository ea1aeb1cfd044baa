-- preempt(id, ep, owner, reason): the owner gives the attempt up. It has freed the job's KV, or, of a staged job, frees it
-- if this says ok: else somebody may be reading it. A reason that begins with
-- `hand-over` is counted by itself, until one succeeds.
-- Answers ok | fenced | done | gone | illegal.
local id, ep, ow, reason = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local no, st = refusal(id, ep, ow, 'preempt')
if no == 'illegal' and st == 'preempted' then return 'ok' end
if no then return no end
unpush(id)
release_export(id)
redis.call('HINCRBY', jobkey(id), 'pe', 1)
if string.sub(reason, 1, 9) == 'hand-over' then redis.call('HINCRBY', jobkey(id), 'hf', 1) end
redis.call('HSET', jobkey(id), 'why', reason)
enter(id, st, 'preempted', now_ms(), reason)
tell(id, { 'p', id, ep, reason })
flush()
return 'ok'
