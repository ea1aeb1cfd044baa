-- batch_end(id, ep, owner, status, progress, output file, error file, errors): the one way a batch ends.
-- Answers ok | fenced | over | gone. A repeat after a lost reply is ok.
local id, ep, owner, status = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local no, st = batch_refusal(id, ep, owner)
if no == 'over' and st == status then
  local v = redis.call('HMGET', batchkey(id), 'ep', 'ow')
  if tonumber(v[1]) == ep and v[2] == owner then return 'ok' end
end
if no then return no end
note_progress(id, ARGV[5])
redis.call('HSET', batchkey(id), 'st', status, 'lease', 0, 'ended', now_ms(),
  'ofile', ARGV[6], 'efile', ARGV[7], 'errs', ARGV[8])
redis.call('ZREM', P .. 'batches', id)
redis.call('PEXPIRE', batchkey(id), BATCH_RETENTION_MS)
return 'ok'
