-- Random jobs through the hook: none may raise, none without a tag may change but for its GPU's type.
-- Returns a function(run, tokens, seed, cases); `run` comes from hook_harness.lua.

local function pick(list)
  return list[math.random(#list)]
end

local SCRAPS = {
  "gpu", "shard", "v100", "v100_0", "v100_1", "a100", "gres:", "gres/", ":", "=", ",", "1", "2", "0", "-1", "1k",
  "18446744073709551615", "'", '"', ";", "--", "\0", "\255\254", "\195\169", " ", "\n", "%s", "%", "GS1:c=1",
  "(", ")", "[", "]", "|", "&", "*2", "none", "cpu=4", string.rep("a", 300), "' OR '1'='1", "');DROP TABLE workload;--",
}
local REQUESTS = { "gres/gpu:1", "gres:gpu:v100:1", "gpu", "gres/gpu:2", "gres/gpu=1", "gres/shard:1" }
local TRES = { "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }
local STRINGS = {
  "features", "req_nodes", "partition", "cpus_per_tres", "mem_per_tres", "tres_bind", "tres_freq", "admin_comment",
  "clusters",
}
local NUMBERS = {
  "num_tasks", "min_nodes", "max_nodes", "ntasks_per_node", "ntasks_per_tres", "cpus_per_task", "sockets_per_node",
  "shared", "immediate", "het_job_offset", "begin_time", "min_mem_per_node", "min_mem_per_cpu", "min_cpus",
}

local function noise()
  local parts = {}
  for i = 1, math.random(0, 6) do
    parts[i] = pick(SCRAPS)
  end
  return table.concat(parts)
end

local function comment(tokens)
  return pick({
    "gpushare:" .. tokens.known,
    "gpushare:" .. tokens.others .. ",max=" .. math.random(0, 2000),
    "gpushare:" .. tokens.unknown .. noise(),
    "gpushare:" .. noise(),
    noise() .. " gpushare:" .. tokens.known,
    "gpushare:gs-" .. noise(),
    noise(),
  })
end

local function random_job(tokens)
  local job = {}
  if math.random() < 0.6 then
    job.comment = comment(tokens)
  end
  for _, name in ipairs(TRES) do
    if math.random() < 0.25 then
      job[name] = math.random() < 0.6 and pick(REQUESTS) or noise()
    end
  end
  for _, name in ipairs(STRINGS) do
    if math.random() < 0.03 then
      job[name] = noise()
    end
  end
  for _, name in ipairs(NUMBERS) do
    if math.random() < 0.04 then
      job[name] = pick({ 0, 1, 2, 7, 65534, 4294967294 })
    end
  end
  for name, value in pairs(job) do
    if value == "" then
      job[name] = nil -- reaches slurmctld as an unset one
    end
  end
  return job
end

local function check_tag(tag)
  local probe = tag:match("^GS1:probe;t=gs%-[a-z2-7]+$") or tag:match("^GS1:probe;t=gs%-[a-z2-7]+;o=gpu:1[;%w=]*$")
  local shared = tag:match("^GS1:c=%d+;t=gs%-[a-z2-7]+;o=gpu:1[;%w=._-]*$")
  assert(probe or shared, "an odd tag: " .. tag)
end

local function check_changes(rc, before, after, tagged)
  local typed = false
  for _, name in ipairs(TRES) do
    typed = typed or (before[name] or ""):find("v100", 1, true)
  end
  for name in pairs(after) do
    if after[name] ~= before[name] then
      assert(rc == slurm.SUCCESS, "a refused job was changed: " .. name)
      assert(tagged or typed, "an untagged job was changed: " .. name)
      assert(tagged or name == "features" or name:match("^tres_per_"), "a typed job got another " .. name)
    end
  end
  for name in pairs(before) do
    assert(after[name] ~= nil or tagged, "an untagged job lost its " .. name)
  end
end

return function(run, tokens, seed, cases)
  math.randomseed(seed)
  local tags, refusals = 0, 0
  for _ = 1, cases do
    local job = random_job(tokens)
    local desc, after = run.descriptor(job, math.random() < 0.9)
    local _, before = run.descriptor(job)
    local rc = slurm_job_submit(desc, run.partitions, 1000)
    assert(rc == slurm.SUCCESS or rc == slurm.ESLURM_ACCESS_DENIED, "rc " .. tostring(rc))
    local changed = after.admin_comment ~= before.admin_comment
    local tag = changed and after.admin_comment:match("GS1:%S*$")
    check_changes(rc, before, after, tag)
    if tag then
      check_tag(tag)
      assert((before.comment or ""):find("gpushare:", 1, true), "tagged without being asked to")
      tags = tags + 1
    end
    refusals = refusals + (rc == slurm.SUCCESS and 0 or 1)
    while #run.said > 0 do
      assert(not table.remove(run.said, 1):find("\n"), "said two lines")
    end
  end
  assert(#run.logged == 0, run.logged[1])
  assert(tags > cases / 100 and refusals > cases / 100, string.format("poor aim: %d tags, %d refusals", tags, refusals))
  print("done")
end
