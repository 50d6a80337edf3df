-- Long and nasty fields through the hook. None may cost more than a plain job by more than a fixed number of
-- instructions, nor more memory than a few copies of the field. Clocks say nothing on a busy machine, so:
--  * Lua's own work is counted in instructions;
--  * what string functions do is not seen by that count, so a long text may meet only the patterns listed here, each
--    of which looks at every character a bounded number of times;
--  * memory is what was allocated in all, with the collector stopped.
-- Returns a function(run, tokens); `run` comes from hook_harness.lua.

local LONG = 1200 -- what the hook takes apart is no longer than 1,024, and a few characters may be added to that
local MOST_INSTRUCTIONS = 150000
local MOST_COPIES = 6

local LINEAR = {
  ["[gG][pP][uU]"] = true,
  ["[sS][hH][aA][rR][dD]"] = true,
  ["[gG][pP][uU][sS][hH][aA][rR][eE]"] = true,
}

local FILLERS = {
  "(", ")", "()", "((a)&", "[", "[a|", "a|", "*2", "&", ",", ":", "=", " ", "\0", "%", "%b()", "\255", "x",
  "gpu", "shard", "shar", "gres/gpu:v100:1,", "gres:", "gres/shard:v100_0:1,", "gpushare:", "gpushar ", "max=1,",
  "GS1:c=1 ", "gs-", "gpu[0-9],", "[0-99999999]", "1",
}
local TEXTS = {
  "comment", "clusters", "cpus_per_tres", "features", "mem_per_tres", "partition", "req_nodes", "tres_bind", "tres_freq",
  "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task",
}
local SIZES = { 1000, 60000 }

local offence

local function watch_patterns()
  for _, name in ipairs({ "find", "match", "gmatch", "gsub" }) do
    local original = string[name]
    string[name] = function(text, pattern, ...)
      if type(text) == "string" and #text > LONG and not LINEAR[pattern] then
        offence = string.format("string.%s with '%s' on %d characters", name, tostring(pattern), #text)
      end
      return original(text, pattern, ...)
    end
  end
  for _, name in ipairs({ "lower", "upper", "rep", "reverse", "byte" }) do
    local original = string[name]
    string[name] = function(text, ...)
      if type(text) == "string" and #text > LONG then
        offence = string.format("string.%s on %d characters", name, #text)
      end
      return original(text, ...)
    end
  end
end

-- Instructions and bytes that a call took.
local function cost(call)
  local counted = 0
  collectgarbage()
  collectgarbage("stop")
  local before = collectgarbage("count")
  debug.sethook(function()
    counted = counted + 100
  end, "", 100)
  call()
  debug.sethook()
  local bytes = (collectgarbage("count") - before) * 1024
  collectgarbage("restart")
  return counted, bytes
end

local function check(what, size, call)
  offence = nil
  local instructions, bytes = cost(call)
  assert(not offence, what .. ": " .. tostring(offence))
  assert(instructions < MOST_INSTRUCTIONS, string.format("%s: %d instructions", what, instructions))
  local allowed = 1000000 + MOST_COPIES * size
  assert(bytes < allowed, string.format("%s: %d bytes, %d allowed", what, bytes, allowed))
end

return function(run, tokens)
  local rep = string.rep
  watch_patterns()
  local record = { partition = "gpu", admin_comment = "GS1:c=1;t=" .. tokens.known .. ";o=gpu:1" }
  for _, field in ipairs(TEXTS) do
    for _, filler in ipairs(FILLERS) do
      for _, size in ipairs(SIZES) do
        local job = { comment = "gpushare:" .. tokens.known, tres_per_node = "gres/gpu:v100:1" }
        job[field] = rep(filler, math.ceil(size / #filler))
        local what = string.format("%s of %d x '%s'", field, size, filler)
        local desc, after = run.descriptor(job, true)
        check("submit " .. what, size, function()
          local rc = slurm_job_submit(desc, run.partitions, 1000)
          assert(rc == slurm.SUCCESS or rc == slurm.ESLURM_ACCESS_DENIED, what)
        end)
        assert(size <= 1024 or not after.admin_comment, what .. ": tagged")
        for _, existing in ipairs({ record, { partition = "other", [field] = job[field] } }) do
          local change = run.descriptor(job, false)
          local job_rec = setmetatable({}, { __index = existing })
          check("modify " .. what, size, function()
            slurm_job_modify(change, job_rec, run.partitions, 1000)
          end)
        end
      end
    end
  end
  assert(#run.logged == 0, run.logged[1])
  print("done")
end
