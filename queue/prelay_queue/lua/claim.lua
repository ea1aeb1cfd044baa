-- claim(stream, entry, id, owner, lease_ms, place): take the job that a work stream handed out.
-- place=0 puts the entry back, at the front of its class. Safe to repeat: the same owner gets the same job again.
-- Answers {ok, job fields…} | {stale} | {back} | {ended}.
local stream, entry, id, ow, lease, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1'

local function drop_entry()
  redis.call('XACK', stream, 'g', entry)
  redis.call('XDEL', stream, entry)
end

local v = redis.call('HMGET', jobkey(id), 'st', 'ep', 'ow', 'sk', 'si')
local st, ep = v[1], tonumber(v[2])
local mine = v[3] == ow and ow ~= '' and (st == 'prefill' or st == 'adopting')
if st and not mine and v[4] == stream and v[5] == entry then
  local to = advance(st, 'claim')
  if not to then drop_entry() return { 'stale' } end
  if overdue(id) then
    conclude(id, st, ep, 'deadline', '')
    flush()
    return { 'ended' }
  end
  if not place then
    unpush(id)
    push(id, string.match(stream, '}:work:(.*):[^:]+:[rn]$'), 'r')
    return { 'back' }
  end
  unpush(id)
  enter(id, st, to, now_ms() + lease)
  redis.call('HSET', jobkey(id), 'ow', ow)
elseif not mine then
  drop_entry()
  return { 'stale' }
end
local f = redis.call('HMGET', jobkey(id), 'v', 'ep', 'spec', 'kv', 'pe', 'cr', 'sub', 'dl')
return { 'ok', f[1], f[2], f[3], f[4] or '', f[5], f[6], f[7], f[8], log_ids(id) }
