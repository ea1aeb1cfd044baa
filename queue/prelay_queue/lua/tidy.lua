-- tidy(): take the consumers of workers that are gone out of the groups, so that restarts do not pile them up.
-- Never one with a pending entry: XGROUP DELCONSUMER would drop it. Answers how many went.
local removed, stages = 0, { 'prefill' }
for _, domain in ipairs(redis.call('SMEMBERS', P .. 'domains')) do table.insert(stages, 'decode:' .. domain) end

local function tidy(stream)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, 'g')
  if consumers.err then return end  -- no such stream or group
  for _, pairs_ in ipairs(consumers) do
    local about = {}
    for i = 1, #pairs_, 2 do about[pairs_[i]] = pairs_[i + 1] end
    if about.pending == 0 and redis.call('EXISTS', P .. 'worker:' .. about.name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, 'g', about.name)
      removed = removed + 1
    end
  end
end

for _, stage in ipairs(stages) do
  for _, class in ipairs({ 'interactive', 'normal', 'batch' }) do
    tidy(P .. 'work:' .. stage .. ':' .. class .. ':r')
    tidy(P .. 'work:' .. stage .. ':' .. class .. ':n')
  end
end
return removed
