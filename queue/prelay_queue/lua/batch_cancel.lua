-- batch_cancel(id): ask the runner to cancel what is not done. Answers the status now, or gone. What is over stays as it is.
local id = ARGV[1]
local st = redis.call('HGET', batchkey(id), 'st')
if not st then return 'gone' end
if OVER[st] then return st end
redis.call('HSET', batchkey(id), 'cx', 1, 'st', 'cancelling')
redis.call('HSETNX', batchkey(id), 'cancelling', now_ms())
list_batch(id)
return 'cancelling'
