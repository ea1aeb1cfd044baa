-- batch_open(id, record, left_ms, floor): a batch that Redis does not know begins; its deadline is `left_ms` from now, and
-- its epochs are above `floor`, for on disk may lie what earlier ones wrote before Redis lost it.
-- Answers new | exists. No allow-oom here: a full Redis refuses new work and drains the old.
local id, now = ARGV[1], now_ms()
local st = redis.call('HGET', batchkey(id), 'st')
if st then
  if not OVER[st] then list_batch(id) end
  return 'exists'
end
redis.call('HSET', batchkey(id), 'rec', ARGV[2], 'st', 'validating', 'ep', ARGV[4], 'ow', '', 'lease', 0,
  'total', 0, 'done', 0, 'failed', 0, 'pt', 0, 'ct', 0, 'created', now, 'exp', now + tonumber(ARGV[3]), 'cx', 0)
list_batch(id)
return 'new'
