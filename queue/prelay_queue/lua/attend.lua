-- attend(api, ttl_s, begin): an API process lives. With begin=1 its live stream is made (writers skip one that is not
-- there). A script so that a full server, which refuses plain writes, does not make a living process deaf.
-- Answers {the entry to read on from, or '', server ms}.
local live, entry, now = P .. 'live:' .. ARGV[1], '', now_ms()
if ARGV[3] == '1' then entry = redis.call('XADD', live, 'MAXLEN', '~', 4096, '*', 'e', '[]') end
redis.call('EXPIRE', live, ARGV[2])
redis.call('ZADD', P .. 'apis', now, ARGV[1])
return { entry, now }
