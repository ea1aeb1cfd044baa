-- renew(owner, lease_ms, [[id, ep, kind]…]): kind run = I own the attempt, export = I hold its KV for a decode worker.
-- Answers per item: run → kept | done | lost; export → hold | release.
local now, answers = now_ms(), {}
for _, item in ipairs(cjson.decode(ARGV[3])) do
  local id, ep, kind = item[1], item[2], item[3]
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow', 'kvo', 'kve', 'sk', 'si')
  local answer
  if kind == 'run' then
    if v[1] == 'done' then answer = 'done'
    elseif not v[1] or tonumber(v[2]) ~= ep or v[3] ~= ARGV[1] or v[1] == 'preempted' then answer = 'lost'
    else answer = 'kept' end
  elseif v[4] == ARGV[1] and tonumber(v[5]) == ep then answer = 'hold'
  else answer = 'release' end
  if answer == 'kept' or (answer == 'hold' and v[3] == ARGV[1]) then
    redis.call('ZADD', P .. 'leases', now + tonumber(ARGV[2]), id)
  end
  -- A staged job whose stream entry was lost (XTRIM, DEL) is offered again.
  if answer == 'hold' and v[1] == 'staged' and #redis.call('XRANGE', v[6], v[7], v[7]) == 0 then
    push(id, string.match(v[6], '}:work:(.*):[^:]+:[rn]$'), 'r')
  end
  table.insert(answers, answer)
end
return answers
