-- reap(limit, preempt_grace_ms, queued_check_ms, max_alone_crashes, error, latest_ms, api_grace_ms): give back what
-- nobody looks after.
-- Run it only after one lease of uninterrupted contact. A call that arrives after `latest_ms` (server time; 0: any) was
-- held up, perhaps with everybody's renewals behind it, and does nothing.
-- Answers {reaped ids}, {requeued ids}, {pushed ids}, {dead ids}, {abandoned ids}.
local limit, grace, check, max_alone, dead_error =
  tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local latest, api_grace = tonumber(ARGV[6]), tonumber(ARGV[7])
local now = now_ms()
local reaped, requeued, pushed, dead, abandoned = {}, {}, {}, {}, {}

if latest > 0 and now > latest then return { reaped, requeued, pushed, dead, abandoned } end

-- Crashes of all kinds after which a job is given up: one that gets a little further each time must end too.
local MAX_CRASHES = 8
-- A dead letter has its job, to be tried again, if that is no longer.
local LETTER_BYTES = 65536

local function due(index, before)
  return redis.call('ZRANGEBYSCORE', P .. index, '-inf', before, 'LIMIT', 0, limit)
end

-- 1. Leases that ended: the owner died, hangs or is cut off. A crash while alone counts towards the dead letter.
for _, id in ipairs(due('leases', now)) do
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow', 'nx')
  if not v[1] or not advance(v[1], 'reap') then
    redis.call('ZREM', P .. 'leases', id)
  else
    local ep = tonumber(v[2])
    control(v[3], 'stop', id, ep)
    -- Waiting staged is not running: the exporter's death says nothing about this job.
    if v[1] ~= 'staged' then
      redis.call('HINCRBY', jobkey(id), tonumber(v[4]) <= alone_until(id) and 'ca' or 'cr', 1)
      redis.call('HSET', jobkey(id), 'cs', v[4])
    end
    local company, alone = number(id, 'cr'), number(id, 'ca')
    if alone >= max_alone or company + alone >= MAX_CRASHES then
      local spec, form = field(id, 'spec'), field(id, 'vw')
      conclude(id, v[1], ep, 'error', dead_error)
      local why = company .. ' crashes in company, ' .. alone .. ' alone'
      local kept = spec and #spec <= LETTER_BYTES and spec or ''
      redis.call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'id', id, 'why', why, 'spec', kept, 'vw', form or '')
      table.insert(dead, id)
    else
      restart(id, v[1], ep, -1, 'lease ended')
      table.insert(reaped, id)
    end
  end
end

-- 2. Preempts that no relay answered.
for _, id in ipairs(due('preempted', now - grace)) do
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep')
  if v[1] == 'preempted' then
    restart(id, v[1], tonumber(v[2]), -1, 'no relay')
    table.insert(requeued, id)
  else
    redis.call('ZREM', P .. 'preempted', id)
  end
end

-- 3. Queued jobs whose stream entry is gone (XTRIM, DEL of the stream), or who are not counted (DEL, eviction).
for _, id in ipairs(due('queued', now - check)) do
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'sk', 'si')
  if v[1] ~= 'queued' then
    redis.call('ZREM', P .. 'queued', id)
    leave_waiting(id)
  else
    if redis.call('HEXISTS', P .. 'waiting', id) == 0 then join_waiting(id) end
    if not v[3] or #redis.call('XRANGE', v[3], v[4], v[4]) == 0 then
      push(id, 'prefill', 'r')
      table.insert(pushed, id)
    end
    redis.call('ZADD', P .. 'queued', now, id)
  end
end

-- 4. API processes that have not been heard of for the grace: they watch nothing any more, and what only they watched
-- ends. One process a sweep, since this looks at every job of the partition that is not over.
for _, api in ipairs(redis.call('ZRANGEBYSCORE', P .. 'apis', '-inf', now - api_grace, 'LIMIT', 0, 1)) do
  for _, index in ipairs({ 'queued', 'leases', 'preempted' }) do
    for _, id in ipairs(redis.call('ZRANGE', P .. index, 0, -1)) do
      local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'at', 'ow')
      local left, gone = without(v[3] or '', function(token) return string.sub(token, 1, #api + 1) == api .. '#' end)
      if gone then redis.call('HSET', jobkey(id), 'at', left) end
      if gone and left == '' then
        abandon(id, v[1], tonumber(v[2]), v[4], 'cancelled')
        table.insert(abandoned, id)
      end
    end
  end
  redis.call('ZREM', P .. 'apis', api)
end
flush()
return { reaped, requeued, pushed, dead, abandoned }
