-- submit(jobs): [{id, spec, cls, pt, mt, n, ttl, at, ep, ids, notes}] of one request, all or (on OOM) none.
-- Answers new | exists per job. `ep` and `ids` above 1/empty rebuild a job that Redis lost; one that has all its
-- tokens already ends instead of running.
-- No allow-oom here: a full Redis refuses new work and drains the old.
local answers = {}
for _, job in ipairs(cjson.decode(ARGV[1])) do
  if redis.call('EXISTS', jobkey(job.id)) == 1 then
    table.insert(answers, 'exists')
  else
    local now = now_ms()
    -- What may have outlived the job hash (DEL, eviction): a log that would refuse our entries, a stale index.
    redis.call('DEL', logkey(job.id))
    redis.call('ZREM', P .. 'leases', job.id)
    redis.call('ZREM', P .. 'preempted', job.id)
    local dl = job.ttl > 0 and now + job.ttl or 0
    redis.call('HSET', jobkey(job.id), 'v', ARGV[2], 'st', 'queued', 'ep', job.ep, 'ow', '', 'nx', #job.ids,
      'spec', job.spec, 'pt', job.pt, 'mt', job.mt, 'n', job.n, 'cls', job.cls, 'sub', now, 'dl', dl,
      'at', job.at, 'pe', 0, 'cr', 0, 'ca', 0, 'rs:' .. job.ep, #job.ids)
    for i, token in ipairs(job.ids) do
      write_token(job.id, job.ep, i - 1, token, job.notes[i])
    end
    redis.call('ZADD', P .. 'queued', now, job.id)
    -- Its API process may never have said that it lives: it dies, or Redis was away until now.
    for api in string.gmatch(job.at, '([^ #]+)#') do redis.call('ZADD', P .. 'apis', 'NX', now, api) end
    if #job.ids >= job.mt then
      conclude(job.id, 'queued', job.ep, 'length', '')
    else
      push(job.id, 'prefill', job.ep > 1 and 'r' or 'n')
    end
    table.insert(answers, 'new')
  end
end
flush()
return answers
