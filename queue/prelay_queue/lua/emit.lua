-- emit(owner, [[id, ep, seq, [token…], [note…]?]…]): the tokens of one decode step, all jobs of the partition.
-- Answers per job {ok|gap|fenced|done|gone|illegal, next}.
local answers = {}
for _, item in ipairs(cjson.decode(ARGV[2])) do
  local id, ep, seq, ids, notes = item[1], item[2], item[3], item[4], item[5]
  local no, _, nx, at = refusal(id, ep, ARGV[1], 'emit')
  if no then
    table.insert(answers, { no, 0 })
  else
    local code, next_ = append(id, ep, seq, ids, nx, at, notes)
    table.insert(answers, { code, next_ })
  end
end
flush()
return answers
