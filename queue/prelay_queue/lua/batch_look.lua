-- batch_look(id): all that stands of a batch, and ms that the lease and the time to the deadline have left; nil: unknown.
local v = redis.call('HMGET', batchkey(ARGV[1]), 'rec', 'st', 'ep', 'ow', 'cx', 'ofile', 'efile', 'errs',
  'total', 'done', 'failed', 'pt', 'ct', 'created', 'started', 'finalizing', 'cancelling', 'ended', 'exp', 'lease')
if not v[2] then return false end
local now = now_ms()
local answer = {}
for i = 1, 20 do answer[i] = v[i] or '' end
answer[21] = math.max(0, (tonumber(v[20]) or 0) - now)
answer[22] = (tonumber(v[19]) or now) - now
return answer
