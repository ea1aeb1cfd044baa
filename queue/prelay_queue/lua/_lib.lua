-- Shared by every script. KEYS[1] is the partition's prefix; all keys below share its hash tag.
local P = KEYS[1]
local RETENTION_MS = 300000
local KEYED_RETENTION_MS = 86400000

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function jobkey(id) return P .. 'job:' .. id end
local function logkey(id) return P .. 'log:' .. id end

-- The state after an event, or nil where the table forbids it.
local function advance(st, event) return STEPS[st .. ' ' .. event] end

local function field(id, name) return redis.call('HGET', jobkey(id), name) end
local function number(id, name) return tonumber(redis.call('HGET', jobkey(id), name) or '0') or 0 end

-- How fast the queue drains (keys.py, `drain`), for submit's forecast: what runs, by how long a job takes. Of a job that
-- ends it is noted how long it took and how many ran beside it, once the queue has not been empty for a while: only then
-- are all slots busy. Means of the last ends, each older one counting a little less.
local SETTLED_MS, LATER, DRAIN_KEPT_MS = 1000, 1 - 1 / 64, 3600000
local function running() return redis.call('ZCARD', P .. 'leases') + redis.call('ZCARD', P .. 'preempted') end
local function waits() return redis.call('ZCARD', P .. 'queued') > 0 end
local function note_wait()
  if not waits() then redis.call('HSET', P .. 'drain', 'since', now_ms()) end
  redis.call('PEXPIRE', P .. 'drain', DRAIN_KEPT_MS)
end
local function note_end(id)
  local v, now = redis.call('HMGET', P .. 'drain', 'since', 'jobs', 'ms', 'tokens', 'slots'), now_ms()
  if not waits() then return end
  if not v[1] then redis.call('HSET', P .. 'drain', 'since', now) end  -- it was lost
  if now - (tonumber(v[1]) or now) < SETTLED_MS then return end
  local function mean(n, value) return (tonumber(v[n]) or 0) * LATER + value end
  redis.call('HSET', P .. 'drain', 'last', now, 'jobs', mean(2, 1), 'ms', mean(3, now - number(id, 'cl')),
    'tokens', mean(4, number(id, 'pt')), 'slots', mean(5, running()))
  redis.call('PEXPIRE', P .. 'drain', DRAIN_KEPT_MS)
end

-- What waits, by class (keys.py, `waiting`). A job's share stands beside the sums, so that exactly what was put on is
-- taken off, once, whatever became of the job meanwhile.
local function add_waiting(cls, jobs, tokens)
  for name, change in pairs({ ['#jobs:' .. cls] = jobs, ['#tokens:' .. cls] = tokens }) do
    if redis.call('HINCRBY', P .. 'waiting', name, change) == 0 then redis.call('HDEL', P .. 'waiting', name) end
  end
end
local function leave_waiting(id)
  local share = redis.call('HGET', P .. 'waiting', id)
  if not share then return end
  local cls, tokens = string.match(share, '^(%S+) (%d+)$')
  redis.call('HDEL', P .. 'waiting', id)
  add_waiting(cls, -1, -tonumber(tokens))
end
local function join_waiting(id)
  leave_waiting(id)
  local v = redis.call('HMGET', jobkey(id), 'cls', 'pt')
  redis.call('HSET', P .. 'waiting', id, v[1] .. ' ' .. v[2])
  add_waiting(v[1], 1, tonumber(v[2]))
end

-- A line of the job's history (keys.py, `tl`): it is in the state `to` from now on.
local HISTORY_LINES = 64
local function note_step(id, to, why)
  local v = redis.call('HMGET', jobkey(id), 'tl', 'ep', 'nx', 'ow')
  local worker = v[4] and v[4] ~= '' and v[4] or '-'
  local history = (v[1] and v[1] .. '\n' or '') .. table.concat({ now_ms(), to, v[2], v[3], worker, why }, ' ')
  local _, breaks = string.gsub(history, '\n', '\n')
  if breaks >= HISTORY_LINES then history = string.match(history, '^[^\n]*\n(.*)$') end
  redis.call('HSET', jobkey(id), 'tl', history)
end

-- Move a job between states and keep it in exactly one swept index. `from` is '' for a job that is new. `why` is for
-- those who look at its history.
local function enter(id, from, to, score, why)
  if to == 'queued' then note_wait() end
  if SWEPT[from] and SWEPT[from] ~= SWEPT[to] then redis.call('ZREM', P .. SWEPT[from], id) end
  if SWEPT[to] then redis.call('ZADD', P .. SWEPT[to], score, id) end
  if from == 'queued' then leave_waiting(id) end
  if to == 'queued' then join_waiting(id) end
  if to == 'prefill' then redis.call('HSETNX', jobkey(id), 'cl', now_ms()) end
  redis.call('HSET', jobkey(id), 'st', to)
  note_step(id, to, why)
end

-- Collect live events per API process, and flush them with one XADD each. A quiet viewer, whose name begins with `~`, only
-- hears what it must act on, ends and preempts: a batch has thousands of jobs and reads their answers when they are whole.
local outbox = {}
local LOUD = { t = true, r = true }
local function tell(id, event, at)
  at = at or field(id, 'at')
  if not at or at == '' then return end
  local told = {}
  for api in string.gmatch(at, '([^ #]+)#') do
    if not told[api] and not (LOUD[event[1]] and string.byte(api) == 126) then
      told[api] = true
      outbox[api] = outbox[api] or {}
      table.insert(outbox[api], event)
    end
  end
end
local function flush()
  for api, events in pairs(outbox) do
    redis.call('XADD', P .. 'live:' .. api, 'NOMKSTREAM', 'MAXLEN', '~', 4096, '*', 'e', cjson.encode(events))
  end
end

-- A command to one worker, if it has a control stream (it makes it at start; it expires with the worker).
local function control(worker, op, id, ep)
  if not worker or worker == '' then return end
  redis.call('XADD', P .. 'ctl:' .. worker, 'NOMKSTREAM', 'MAXLEN', '~', 1000, '*',
    'c', cjson.encode({ op = op, id = id, ep = ep }))
end

-- The exporter may free the job's KV: nobody will read this export any more.
local function release_export(id)
  local v = redis.call('HMGET', jobkey(id), 'kvo', 'kve')
  if v[1] and v[1] ~= '' then
    control(v[1], 'release', id, tonumber(v[2]))
    redis.call('HDEL', jobkey(id), 'kv', 'kvo', 'kve')
  end
end

-- A job that was in two crashes may be their cause: it runs alone until it is this many tokens past the last one (a
-- worker may be some steps ahead of the log). Answers the last `nx` at which it must, -1 for never.
local QUARANTINE = 4
local function alone_until(id)
  if number(id, 'cr') < 2 then return -1 end
  return number(id, 'cs') + QUARANTINE
end

-- Put a waiting job into its work stream. Not for a job that stands in one already.
local function push(id, stage, kind)
  local v = redis.call('HMGET', jobkey(id), 'cls', 'pt', 'nx')
  local stream = P .. 'work:' .. stage .. ':' .. v[1] .. ':' .. kind
  local alone = tonumber(v[3]) <= alone_until(id) and 1 or 0
  local entry = redis.call('XADD', stream, '*', 'id', id, 'tok', tonumber(v[2]) + tonumber(v[3]), 'al', alone)
  redis.call('HSET', jobkey(id), 'sk', stream, 'si', entry)
end

-- Take a waiting job out of its work stream.
local function unpush(id)
  local v = redis.call('HMGET', jobkey(id), 'sk', 'si')
  if v[1] and v[1] ~= '' then
    -- Without a group (XGROUP DESTROY, DEL) XACK answers 0; XDEL is what removes the entry.
    redis.call('XACK', v[1], 'g', v[2])
    redis.call('XDEL', v[1], v[2])
    redis.call('HDEL', jobkey(id), 'sk', 'si')
  end
end

-- Attachments without those for which `gone(token)` holds, and whether there was one.
local function without(attachments, gone)
  local left, found = {}, false
  for token in string.gmatch(attachments, '[^ ]+') do
    if gone(token) then found = true else table.insert(left, token) end
  end
  return table.concat(left, ' '), found
end

-- All token ids of the log, in order, their notes (one for each, or none), and the epochs that wrote them.
local function log_tokens(id)
  local ids, notes, noted, epochs = {}, {}, false, {}
  for _, e in ipairs(redis.call('XRANGE', logkey(id), '-', '+')) do
    if e[2][1] == 't' then
      table.insert(ids, tonumber(e[2][2]))
      table.insert(notes, e[2][4] or '')
      noted = noted or e[2][3] == 'x'
      table.insert(epochs, tonumber(string.match(e[1], '^%d+')))
    end
  end
  return ids, noted and notes or {}, epochs
end

local function write_token(id, ep, seq, token, note)
  if note and note ~= '' then
    redis.call('XADD', logkey(id), ep .. '-' .. seq, 't', token, 'x', note)
  else
    redis.call('XADD', logkey(id), ep .. '-' .. seq, 't', token)
  end
end

-- Append tokens to the log: trims what is below `nx`, refuses a gap. `nx` and `at` are the job's, as `refusal` read them.
-- `notes` is nil, empty, or has one note for each token. Returns ok|gap and the new next.
local function append(id, ep, seq, ids, nx, at, notes)
  if seq > nx then return 'gap', nx end
  local noted = notes and #notes > 0
  local fresh, said = {}, {}
  for i = nx - seq + 1, #ids do
    write_token(id, ep, seq + i - 1, ids[i], noted and notes[i])
    table.insert(fresh, ids[i])
    if noted then table.insert(said, notes[i]) end
  end
  if #fresh > 0 then
    redis.call('HSET', jobkey(id), 'nx', nx + #fresh)
    tell(id, noted and { 't', id, ep, nx, fresh, said } or { 't', id, ep, nx, fresh }, at)
  end
  return 'ok', nx + #fresh
end

-- The one way a job ends.
local function conclude(id, from, ep, reason, err)
  local nx = number(id, 'nx')
  unpush(id)
  release_export(id)
  if from ~= 'queued' then note_end(id) end
  enter(id, from, 'done', 0, reason)
  redis.call('ZREM', P .. 'deadlines', id)
  redis.call('HSET', jobkey(id), 'fin', reason, 'err', err, 'end', now_ms())
  redis.call('HDEL', jobkey(id), 'spec')
  redis.call('XADD', logkey(id), ep .. '-' .. nx, 'f', reason, 'e', err)
  local key = field(id, 'ik')
  local keyed = key and key ~= ''
  local kept_ms = keyed and KEYED_RETENTION_MS or RETENTION_MS
  redis.call('PEXPIRE', jobkey(id), kept_ms)
  redis.call('PEXPIRE', logkey(id), kept_ms)
  if keyed then redis.call('PEXPIRE', P .. 'idem:' .. key, KEYED_RETENTION_MS) end
  tell(id, { 'e', id, ep, nx, reason, err })
end

-- The job ends whatever its state, and whoever runs it is told.
local function abandon(id, st, ep, ow, reason)
  control(ow, 'stop', id, ep)
  conclude(id, st, ep, reason, '')
end

-- Begin the next attempt at step 1, keeping the tokens below `resume`. `why`: nobody gave the last one up.
local function restart(id, from, ep, resume, why)
  local nx = number(id, 'nx')
  if resume < 0 or resume > nx then resume = nx end
  redis.call('XADD', P .. 'restarts', 'MAXLEN', '~', 1000, '*', 'id', id, 'ep', ep, 'st', from,
    'ow', field(id, 'ow') or '', 'why', why or field(id, 'why') or '', 'lost', nx - resume)
  if resume < nx then
    local doomed = {}
    for _, e in ipairs(redis.call('XREVRANGE', logkey(id), '+', '-', 'COUNT', nx - resume)) do
      table.insert(doomed, e[1])
    end
    for _, entry in ipairs(doomed) do redis.call('XDEL', logkey(id), entry) end
  end
  unpush(id)
  release_export(id)
  local nep = ep + 1
  redis.call('HSET', jobkey(id), 'ep', nep, 'ow', '', 'nx', resume, 'rs:' .. nep, resume)
  tell(id, { 'r', id, nep, resume })
  if resume >= number(id, 'mt') then
    conclude(id, from, nep, 'length', '')
    return nep, resume
  end
  enter(id, from, 'queued', now_ms(), why)
  push(id, 'prefill', 'r')
  return nep, resume
end

-- What is wrong with a write of (ep, ow) that `event` would make, or nil; then the job's st, nx and at. A job that is
-- over answers `done`. One look for everything: this runs for every token.
local function refusal(id, ep, ow, event)
  local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow', 'nx', 'at')
  if not v[1] then return 'gone' end
  if v[1] == 'done' then return 'done', v[1] end
  if tonumber(v[2]) ~= ep or v[3] ~= ow or ow == '' then return 'fenced', v[1] end
  if not advance(v[1], event) then return 'illegal', v[1] end
  return nil, v[1], tonumber(v[4]), v[5]
end

-- Past its deadline?
local function overdue(id)
  local dl = number(id, 'dl')
  return dl > 0 and now_ms() > dl
end
