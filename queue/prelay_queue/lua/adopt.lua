-- adopt(id, ep, owner): the KV is copied (decode) or stays here (unified); the source may be freed.
-- Answers ok | fenced | done | gone | illegal.
local id, ep, ow = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local no, st = refusal(id, ep, ow, 'adopt')
if no == 'illegal' and st == 'decode' then return 'ok' end
if no then return no end
release_export(id)
redis.call('HDEL', jobkey(id), 'hf')
enter(id, st, 'decode', redis.call('ZSCORE', P .. 'leases', id) or now_ms())
return 'ok'
