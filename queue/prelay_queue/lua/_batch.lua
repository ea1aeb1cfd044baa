-- Shared by the scripts of batches (keys.py, `batch:<id>`), after _lib.lua.
local BATCH_RETENTION_MS = 86400000
local OVER = { completed = true, failed = true, expired = true, cancelled = true }
-- Who takes a batch up begins anew, but its status does not go back.
local RANK = { validating = 1, in_progress = 2, finalizing = 3, cancelling = 4 }

local function batchkey(id) return P .. 'batch:' .. id end

-- A batch that is not over stands in `batches`, also if that was lost.
local function list_batch(id)
  redis.call('ZADD', P .. 'batches', 'NX', tonumber(redis.call('HGET', batchkey(id), 'created')) or 0, id)
end

-- What is wrong with a write of (ep, owner), or nil; then the batch's status.
local function batch_refusal(id, ep, owner)
  local v = redis.call('HMGET', batchkey(id), 'st', 'ep', 'ow')
  if not v[1] then return 'gone' end
  if OVER[v[1]] then return 'over', v[1] end
  if tonumber(v[2]) ~= ep or v[3] ~= owner or owner == '' then return 'fenced', v[1] end
  return nil, v[1]
end

-- Store what `p` (JSON: total, done, failed, prompt tokens, completion tokens) says.
local function note_progress(id, p)
  local n = cjson.decode(p)
  redis.call('HSET', batchkey(id), 'total', n[1], 'done', n[2], 'failed', n[3], 'pt', n[4], 'ct', n[5])
end
