-- expire(limit): end the jobs that are past their deadline, in whatever state; owner and exporter are told. Anybody may
-- run it at any time: a deadline is a moment of the server's clock, and no outage moves it.
-- Answers the ids that ended.
local ended = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'deadlines', '-inf', '(' .. now_ms(), 'LIMIT', 0, ARGV[1])) do
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow')
  if v[1] and v[1] ~= 'done' then
    abandon(id, v[1], tonumber(v[2]), v[3], 'deadline')
    table.insert(ended, id)
  else
    redis.call('ZREM', P .. 'deadlines', id)
  end
end
flush()
return ended
