-- beat(worker, status, ttl_ms): the worker lives, and this is how it stands (a JSON object; `t`, server ms, is added).
-- A script so that a full server cannot make a working fleet look dead. Answers the server's time in ms.
local worker, status, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), now_ms()
redis.call('SET', P .. 'worker:' .. worker, '{"t":' .. now .. ',' .. string.sub(status, 2), 'PX', ttl)
redis.call('ZADD', P .. 'workers', now, worker)
redis.call('ZREMRANGEBYSCORE', P .. 'workers', '-inf', now - 4 * ttl)
redis.call('EXPIRE', P .. 'ctl:' .. worker, 60)
return now
