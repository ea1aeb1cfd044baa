-- renew(owner, lease_ms, [[id, ep, kind]…], stranded_ms): kind run = I own the attempt, export = I hold its KV for a
-- decode worker. A job that has waited staged for `stranded_ms`, in a domain without a live decode worker, goes back to
-- step 1 if it can be run elsewhere.
-- Answers per item: run → kept | done | lost; export → hold | release.
local now, answers = now_ms(), {}
local lease, stranded_ms = tonumber(ARGV[2]), tonumber(ARGV[4])

-- The live workers' roles by domain; read at most once a call.
local fleet
local function roles()
  if fleet then return fleet end
  fleet = {}
  for _, worker in ipairs(redis.call('ZRANGE', P .. 'workers', 0, -1)) do
    local raw = redis.call('GET', P .. 'worker:' .. worker)
    local read, said = pcall(cjson.decode, raw or '')
    if read and type(said) == 'table' and said.domain and said.role and said.state ~= 'draining' then
      fleet[said.domain] = fleet[said.domain] or {}
      fleet[said.domain][said.role] = true
    end
  end
  return fleet
end

-- Can nobody take a job that is staged in `domain`, while others could run it from the start?
local function stranded(domain)
  local here, elsewhere = roles()[domain], false
  if here and here.decode then return false end
  for other, has in pairs(roles()) do
    if has.unified or (other ~= domain and has.prefill and has.decode) then elsewhere = true end
  end
  return elsewhere
end

-- The safety nets of a staged job; answers hold or release.
local function look_after(id, ep, stream, entry)
  local stage, since = string.match(stream, '}:work:(.*):[^:]+:[rn]$'), tonumber(string.match(entry, '^%d+'))
  if now - since > stranded_ms and stranded(string.match(stage, '^decode:(.*)$')) then
    restart(id, 'staged', ep, -1, 'no decode worker')
    return 'release'
  end
  -- Its entry was lost (XTRIM, DEL): it is offered again.
  if #redis.call('XRANGE', stream, entry, entry) == 0 then push(id, stage, 'r') end
  return 'hold'
end

for _, item in ipairs(cjson.decode(ARGV[3])) do
  local id, ep, kind = item[1], item[2], item[3]
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow', 'kvo', 'kve', 'sk', 'si')
  local answer
  if kind == 'run' then
    if v[1] == 'done' then answer = 'done'
    elseif not v[1] or tonumber(v[2]) ~= ep or v[3] ~= ARGV[1] or v[1] == 'preempted' then answer = 'lost'
    else answer = 'kept' end
  elseif v[4] ~= ARGV[1] or tonumber(v[5]) ~= ep then answer = 'release'
  elseif v[1] == 'staged' then answer = look_after(id, ep, v[6], v[7])
  else answer = 'hold' end
  if answer == 'kept' or (answer == 'hold' and v[3] == ARGV[1]) then
    redis.call('ZADD', P .. 'leases', now + lease, id)
  end
  table.insert(answers, answer)
end
flush()
return answers
