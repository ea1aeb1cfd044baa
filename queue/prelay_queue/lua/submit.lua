-- submit(jobs, protocol, max_jobs, max_tokens): [{id, spec, cls, pt, mt, n, ttl, at, vw, ik, dg, ep, ids, notes}] of one request,
-- all or (refused, or on OOM) none. Refused is what would make more jobs, or prompt tokens, of its class wait than the
-- limits say (0: any number), unless nothing waits. Never what was accepted before: a repeat, or a job that Redis lost.
-- Answers new | exists per job; or {busy, class, jobs|tokens, waiting, asked for, limit, retry_ms}; or, for a request
-- with a key (`ik`) that another request has and that did not fail, {kept, its id}, or {other, its id} if that was
-- another body (`dg`).
-- `ep` and `ids` above 1/empty rebuild a job that Redis lost; one that has all its tokens already ends instead of
-- running. No allow-oom here: a full Redis refuses new work and drains the old.
local UNKNOWN_MS, MOST_MS, HERD = 2000, 600000, 10
local KEYED_RUN_MS = 604800000  -- longer than any answer takes
local jobs, max_jobs, max_tokens = cjson.decode(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])

local function waiting(cls)
  local v = redis.call('HMGET', P .. 'waiting', '#jobs:' .. cls, '#tokens:' .. cls)
  return tonumber(v[1]) or 0, tonumber(v[2]) or 0
end

-- When a refused request would find room, if all that were refused before come back first: in ms from now.
local function retry_ms(cls, count, tokens, jobs_waiting, tokens_waiting)
  local v = redis.call('HMGET', P .. 'drain', 'since', 'last', 'jobs', 'ms', 'tokens', 'slots', 'due:' .. cls)
  local now, ended = now_ms(), tonumber(v[3]) or 0
  local quiet_ms = now - math.max(tonumber(v[1]) or now, tonumber(v[2]) or 0)  -- nothing has ended for so long
  if ended == 0 then return math.min(MOST_MS, math.max(UNKNOWN_MS, quiet_ms)) end
  local took_ms, slots, prompt = v[4] / ended, math.max(1, running(), v[6] / ended), math.max(1, v[5] / ended)
  local function ms(of_jobs, of_tokens) return math.max(of_jobs, of_tokens / prompt) * took_ms / slots end
  local room_ms = ms(
    max_jobs > 0 and math.max(0, jobs_waiting + count - max_jobs) or 0,
    max_tokens > 0 and math.max(0, tokens_waiting + tokens - max_tokens) or 0)
  for _, other in ipairs({ 'interactive', 'normal', 'batch' }) do  -- served before it
    if other == cls then break end
    room_ms = room_ms + ms(waiting(other))
  end
  if quiet_ms > took_ms then room_ms = math.max(room_ms, quiet_ms) end  -- as long again as already
  local after_ms = math.max(room_ms, (tonumber(v[7]) or 0) - now + ms(count, tokens))
  -- Who does not wait is refused again and again, and must not push the others out of sight.
  after_ms = math.min(after_ms, MOST_MS, math.max(room_ms, HERD * ms(jobs_waiting, tokens_waiting)))
  redis.call('HSET', P .. 'drain', 'due:' .. cls, now + after_ms)
  return after_ms
end

local function refused(cls, count, tokens)
  local jobs_waiting, tokens_waiting = waiting(cls)
  if count == 0 or jobs_waiting == 0 then return nil end
  local kind, stand, asked, limit
  if max_jobs > 0 and jobs_waiting + count > max_jobs then
    kind, stand, asked, limit = 'jobs', jobs_waiting, count, max_jobs
  elseif max_tokens > 0 and tokens_waiting + tokens > max_tokens then
    kind, stand, asked, limit = 'tokens', tokens_waiting, tokens, max_tokens
  else
    return nil
  end
  local after_ms = math.ceil(retry_ms(cls, count, tokens, jobs_waiting, tokens_waiting))
  return { 'busy', cls, kind, stand, asked, limit, after_ms }
end

-- A request that its client sends again is the one that it sent before, unless that failed or is forgotten.
local first = jobs[1] or { ik = '', ep = 1 }
local idem = P .. 'idem:' .. first.ik
local function sent_before()
  if first.ik == '' or first.ep > 1 then return nil end
  local known, request = redis.call('HMGET', idem, 'id', 'dg'), string.match(first.id, '^(.*)/')
  if not known[1] or known[1] == request then return nil end
  if known[2] ~= first.dg then return { 'other', known[1] } end
  for index = 0, number(known[1] .. '/0', 'n') - 1 do
    local v = redis.call('HMGET', jobkey(known[1] .. '/' .. index), 'st', 'fin')
    if not v[1] or (v[1] == 'done' and v[2] ~= 'stop' and v[2] ~= 'length') then return nil end
  end
  return redis.call('EXISTS', jobkey(known[1] .. '/0')) == 1 and { 'kept', known[1] } or nil
end
local before = sent_before()
if before then return before end

local count, tokens = 0, 0
for _, job in ipairs(jobs) do
  if job.ep == 1 and redis.call('EXISTS', jobkey(job.id)) == 0 then count, tokens = count + 1, tokens + job.pt end
end
local no = count > 0 and refused(jobs[1].cls, count, tokens)
if no then return no end

if first.ik ~= '' and (first.ep == 1 or redis.call('EXISTS', idem) == 0) then
  redis.call('HSET', idem, 'id', string.match(first.id, '^(.*)/'), 'dg', first.dg)
  redis.call('PEXPIRE', idem, KEYED_RUN_MS)
end

local answers = {}
for _, job in ipairs(jobs) do
  if redis.call('EXISTS', jobkey(job.id)) == 1 then
    table.insert(answers, 'exists')
  else
    local now = now_ms()
    -- What may have outlived the job hash (DEL, eviction): a log that would refuse our entries, a stale index.
    redis.call('DEL', logkey(job.id))
    for _, index in ipairs({ 'leases', 'preempted', 'deadlines' }) do redis.call('ZREM', P .. index, job.id) end
    local dl = job.ttl > 0 and now + job.ttl or 0
    redis.call('HSET', jobkey(job.id), 'v', ARGV[2], 'ep', job.ep, 'ow', '', 'nx', #job.ids,
      'spec', job.spec, 'pt', job.pt, 'mt', job.mt, 'n', job.n, 'cls', job.cls, 'sub', now, 'dl', dl,
      'at', job.at, 'vw', job.vw, 'ik', job.ik, 'pe', 0, 'cr', 0, 'ca', 0, 'rs:' .. job.ep, #job.ids)
    for i, token in ipairs(job.ids) do
      write_token(job.id, job.ep, i - 1, token, job.notes[i])
    end
    enter(job.id, '', 'queued', now)
    if dl > 0 then redis.call('ZADD', P .. 'deadlines', dl, job.id) end
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
