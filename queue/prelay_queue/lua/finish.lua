-- finish(id, ep, owner, seq, [token…], reason, error, [note…]): the last tokens and the one terminal event.
-- Answers ok | fenced | done | gone | illegal | gap. A repeat after a lost reply is ok.
local id, ep, ow, seq, reason, err = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[6], ARGV[7]
local no, st, nx, at = refusal(id, ep, ow, 'finish')
if no == 'done' then
  local v = redis.call('HMGET', jobkey(id), 'ep', 'ow', 'fin')
  if tonumber(v[1]) == ep and v[2] == ow and v[3] == reason then return 'ok' end
end
if no then return no end
local ids = cjson.decode(ARGV[5])
if #ids > 0 then
  local code = append(id, ep, seq, ids, nx, at, cjson.decode(ARGV[8]))
  if code ~= 'ok' then return code end
end
conclude(id, st, ep, reason, err)
flush()
return 'ok'
