-- claim(stream, entry, id, owner, lease_ms, place, protocol): take the job that a work stream handed out.
-- place=0 puts the entry back, at the front of its class; so does a job of a protocol above the caller's, at the end.
-- Safe to repeat: the owner gets the same job again for the same entry.
-- Answers {ok, job fields…} | {stale} | {back} | {newer} | {ended}.
local stream, entry, id, ow, lease, place, protocol =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1', tonumber(ARGV[7])
local claimed = stream .. ' ' .. entry

local function drop_entry()
  redis.call('XACK', stream, 'g', entry)
  redis.call('XDEL', stream, entry)
end

local function put_back(kind)
  unpush(id)
  push(id, string.match(stream, '}:work:(.*):[^:]+:[rn]$'), kind)
end

local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow', 'sk', 'si', 'ce', 'v')
local st, ep = v[1], tonumber(v[2])
local mine = v[3] == ow and v[6] == claimed and (st == 'prefill' or st == 'adopting')
if st and not mine and v[4] == stream and v[5] == entry then
  local to = advance(st, 'claim')
  if not to then drop_entry() return { 'stale' } end
  if overdue(id) then
    conclude(id, st, ep, 'deadline', '')
    flush()
    return { 'ended' }
  end
  if tonumber(v[7]) > protocol then put_back('n') return { 'newer' } end
  if not place then put_back('r') return { 'back' } end
  unpush(id)
  redis.call('HSET', jobkey(id), 'ow', ow, 'ce', claimed)
  enter(id, st, to, now_ms() + lease)
  if number(id, 'wp') == ep then control(ow, 'preempt', id, ep) end  -- asked of the owner before
elseif not mine then
  drop_entry()
  return { 'stale' }
end
local f = redis.call('HMGET', jobkey(id), 'ep', 'spec', 'kv', 'pe', 'sub', 'dl', 'hf', 'nx')
local ids = tonumber(f[8]) > 0 and log_tokens(id) or {}
return { 'ok', f[1], f[2], f[3] or '', f[4], alone_until(id), f[5], f[6], f[7] or 0, ids }
