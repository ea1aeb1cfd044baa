-- handoff(id, ep, owner, seq, token, kv, domain, lease_ms, note): the KV is ready; emit the first token and stage the job.
-- Answers ok | fenced | done | gone | illegal | gap. A repeat is ok until the adoption, and fenced (free the export)
-- after it.
local id, ep, ow, seq, token, kv, domain, lease =
  ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7], tonumber(ARGV[8])
local v = redis.call('HMGET', jobkey(id), 'kvo', 'kve')
if v[1] == ow and tonumber(v[2]) == ep then return 'ok' end
local no, st, nx, at = refusal(id, ep, ow, 'handoff')
if no then return no end
local code = append(id, ep, seq, { token }, nx, at, ARGV[9] ~= '' and { ARGV[9] })
if code ~= 'ok' then return code end
redis.call('HSET', jobkey(id), 'kv', kv, 'kvo', ow, 'kve', ep)
enter(id, st, 'staged', now_ms() + lease)
redis.call('SADD', P .. 'domains', domain)
push(id, 'decode:' .. domain, ep > 1 and 'r' or 'n')
flush()
return 'ok'
