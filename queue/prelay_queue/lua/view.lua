-- view(id): state, epoch, resume of the epoch, finish reason, error, all token ids, their notes and the epochs that wrote
-- them, in one look; nil: unknown job.
-- A script because a full server refuses MULTI, and whoever watches a job must be able to look at any time.
local v = redis.call('HMGET', jobkey(ARGV[1]), 'st', 'ep', 'fin', 'err')
if not v[1] then return false end
local ids, notes, epochs = log_tokens(ARGV[1])
return { v[1], v[2], field(ARGV[1], 'rs:' .. v[2]) or '0', v[3] or '', v[4] or '', ids, notes, epochs }
