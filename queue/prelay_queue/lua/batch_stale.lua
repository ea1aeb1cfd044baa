-- batch_stale(after_ms, limit): batches that nobody runs: their lease ended, or nobody took them since they began, more than
-- `after_ms` ago. First those that somebody ran, then by age: most of the others only wait for a runner.
-- It looks at every batch that is not over, and takes out of `batches` what does not belong there.
local before, limit = now_ms() - tonumber(ARGV[1]), tonumber(ARGV[2])
local found, untaken = {}, {}
for _, id in ipairs(redis.call('ZRANGE', P .. 'batches', 0, -1)) do
  local v = redis.call('HMGET', batchkey(id), 'st', 'ow', 'lease', 'created')
  if not v[1] or OVER[v[1]] then
    redis.call('ZREM', P .. 'batches', id)
  elseif v[2] ~= '' then
    if tonumber(v[3]) < before then table.insert(found, id) end
  elseif tonumber(v[4]) < before then
    table.insert(untaken, id)
  end
end
for _, id in ipairs(untaken) do table.insert(found, id) end
return { unpack(found, 1, math.min(limit, #found)) }
