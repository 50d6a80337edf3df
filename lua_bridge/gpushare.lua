-- slurm-gpushare in slurmctld: turns `sbatch --comment=gpushare:TOKEN` into a tagged, shareable job.
--
-- A site's job_submit.lua calls `job_submit` and `job_modify` (see job_submit.lua beside this file). Both run under
-- slurmctld's locks, one call at a time: no write but to the job, no subprocess, no network, no look at other jobs.
-- Whatever breaks in here, the job goes on as its user wrote it and slurmctld's log gets a line. Lua 5.1 to 5.4.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local conf = dofile(here .. "gpushare_conf.lua")
local fields = dofile(here .. "gpushare_fields.lua")
local request = dofile(here .. "gpushare_request.lua")
local store = dofile(here .. "gpushare_store.lua")

local M = { conf = conf, fields = fields, request = request, store = store }

-- Before this release a whole-GPU job could start beside a sharer that had lost its neighbour, so that single GPUs are
-- asked for as all shards of one. Before RETARGET a pending job could not change from gpu to shard, nor from untyped
-- to typed shards (found in Slurm's source: job updates start from an empty list of gres since 23.02.6).
M.WHOLE_GPU_SAFE = 231105
M.RETARGET = 230206
M.SLASH_PREFIX = 231100
M.MODIFY_MESSAGE = 230200 -- from here on a refused change may say why
M.LOG_SECONDS = 60

local last_logged, suppressed = {}, {}

-- One line a minute of each kind: a fault that hits every submission must not fill the log.
local function log(kind, message)
  local now = os.time()
  if last_logged[kind] and now >= last_logged[kind] and now - last_logged[kind] < M.LOG_SECONDS then
    suppressed[kind] = (suppressed[kind] or 0) + 1
    return
  end
  local more = suppressed[kind] and string.format(" (%d more like this)", suppressed[kind]) or ""
  last_logged[kind], suppressed[kind] = now, nil
  slurm.log_error("%s", "gpushare: " .. message:gsub("[%c]", " "):sub(1, 300) .. more)
end

local function tell(message)
  slurm.log_user("%s", "gpushare: " .. message)
end

-- slurmctld runs as SlurmUser, and so does the helper.
local function own_uid()
  local file = io.open("/proc/self/status", "r")
  local uid = file and (file:read("*a") or ""):match("Uid:%s+%d+%s+(%d+)")
  if file then
    file:close()
  end
  return tonumber(uid or "0")
end

local slurm_uid = own_uid()

local function is_privileged(uid)
  return uid == 0 or uid == slurm_uid
end

-- The job's partitions, the default one if it names none: (list, how many of them are shared).
local function partitions_of(names, part_list, settings)
  local list, shared = {}, 0
  for name in (names or ""):gmatch("[^,]+") do
    list[#list + 1] = name
  end
  if #list == 0 then
    for name, partition in pairs(part_list or {}) do
      if fields.reader(partition, fields.PARTITION)("flag_default") == 1 then
        list[1] = name
      end
    end
  end
  for _, name in ipairs(list) do
    shared = shared + (settings.partitions[name] and 1 or 0)
  end
  return list, shared
end

-- "gpushare:TOKEN,max=10" as a word of the comment: token, max. (nil, reason) if it is malformed, nil if there is none.
function M.parse_comment(comment)
  local word = comment and (" " .. comment):match("%sgpushare:(%S*)")
  if not word then
    return nil
  end
  local token, options = word:match("^([^,]*)(.*)$")
  if not store.is_token(token) then
    return nil, "that is not a workload token. Make one with: gpushare token NAME"
  end
  local max
  for option in options:gmatch("[^,]+") do
    max = option:match("^max=(%d%d?%d?)$")
    if not max then
      return nil, "only the option max=PERCENT may follow the token"
    end
  end
  return token, nil, tonumber(max)
end

-- The partitions' common default, or false if they differ.
local function common_default(table_, list)
  local value = table_[list[1]]
  for _, name in ipairs(list) do
    if table_[name] ~= value then
      return false
    end
  end
  return value
end

local turn = 0

-- Where the site's release can only retarget typed shards, jobs are spread over the indices from the start.
local function next_index(settings)
  turn = (turn + 1) % settings.gpus_per_node
  return turn
end

local function with_tag(admin_comment, tag)
  local kept = (" " .. (admin_comment or "")):gsub("%sGS1:%S*", ""):gsub("^%s+", "")
  return kept == "" and tag or kept .. " " .. tag
end

-- The reason for which a job is none of our business although it asks for one GPU, or nil.
local function left_alone(read, job_desc)
  if read("het_job_offset") then
    return "heterogeneous jobs are left alone"
  elseif read("clusters") then
    return "jobs sent to other clusters (-M) are left alone"
  elseif (read("immediate") or 0) ~= 0 then
    return "--immediate jobs are left alone"
  elseif read("shared") and read("shared") ~= 1 then
    return "--exclusive asks for the whole node"
  elseif not fields.is_batch(job_desc) then
    return "only sbatch jobs share"
  end
  return nil
end

-- Everything a one-GPU job becomes: {fields to write, request per node without prefix}. nil and the reason if it cannot.
local function shareable(read, settings, list, single, tagged)
  local cpus = common_default(settings.def_cpu_per_gpu, list)
  local mem_mib = common_default(settings.def_mem_per_gpu_mib, list)
  if cpus == false or mem_mib == false then
    return nil, "its partitions have different defaults per GPU"
  end
  local wanted, reason = request.carry_along(read, single, cpus, mem_mib)
  if not wanted then
    return nil, reason
  end
  local version = settings.slurm_version or math.huge
  local what = "gpu:1"
  if single.type then
    what = string.format("shard:%s:%d", single.type, settings.shards_per_gpu)
  elseif tagged and version < M.RETARGET then
    what = string.format("shard:%s_%d:%d", settings.gpu_model, next_index(settings), settings.shards_per_gpu)
  elseif version < M.WHOLE_GPU_SAFE or mem_mib then
    -- A pending gpu request on a partition with DefMemPerGPU carries that default, and cannot become shards any more.
    what = string.format("shard:%d", settings.shards_per_gpu)
  end
  local prefix = single.prefix or (version < M.SLASH_PREFIX and "gres:" or "gres/")
  return request.per_node(read, single, wanted, prefix, what), what
end

-- The tagged form of a known workload's job.
local function tagged_job(read, wanted, what, known, token, max, settings)
  local now = os.time()
  local lease = (read("begin_time") or 0) <= now
  local parts = { "GS1:c=" .. string.format("%d", known.cluster), "t=" .. token, "o=" .. what }
  if read("req_nodes") then
    parts[#parts + 1] = "w=" .. read("req_nodes")
  end
  if lease then
    parts[#parts + 1] = "l=1"
    wanted.begin_time = now + settings.lease_s
  end
  if max then
    parts[#parts + 1] = string.format("m=%d", max)
  end
  wanted.admin_comment = with_tag(read("admin_comment"), table.concat(parts, ";"))
  return wanted
end

local PROBED = "first run of this workload: it gets a whole GPU and is measured. Later runs may share."
local SHARED = "this job may share its GPU with another; it is placed within %d s. "
  .. "To have a GPU alone, leave out --comment=gpushare:..."

-- What becomes of a job that asks for GPUs, on partitions that are all shared: {field = value} or nil, then a line for
-- the user if it takes part, then the reason if it does not.
local function decide(job_desc, read, asked, settings, list, token, max)
  local single, reason = request.single_gpu(read, asked)
  local model = settings.gpu_model
  if single and single.type and not (single.type:sub(1, #model + 1) == model .. "_") then
    single, reason = nil, "it asks for a GPU of another type"
  elseif single and single.type and token then
    reason = "it names one GPU by its type"
  end
  local old = settings.slurm_version and settings.slurm_version < M.WHOLE_GPU_SAFE
  if not single or not (token or old) then
    return nil, nil, reason
  end
  local alone = left_alone(read, job_desc)
  if alone then
    return nil, nil, alone
  end
  local known
  if token and not reason and settings.policy ~= "off" then
    local ok, found = pcall(store.look_up, settings.hook_file, token)
    if not ok then
      log("store", tostring(found))
      reason = "sharing is not available now"
    elseif not found or found.uid ~= read("user_id") or not found.cluster then
      -- Somebody else's token looks exactly like one that was never seen.
      local wanted = old and shareable(read, settings, list, single, false) or {}
      wanted.admin_comment = with_tag(read("admin_comment"), "GS1:probe;t=" .. token)
      return wanted, PROBED
    elseif math.abs(os.time() - (found.heartbeat_s or 0)) > settings.heartbeat_s then
      reason = "sharing is not running now"
    else
      known = found
    end
  elseif token and not reason then
    reason = "sharing is switched off"
  end
  if not known and not old then
    return nil, nil, reason
  end
  local wanted, what = shareable(read, settings, list, single, known ~= nil)
  if not wanted then
    return nil, nil, reason or what
  end
  if known then
    return tagged_job(read, wanted, what, known, token, max, settings), string.format(SHARED, settings.lease_s)
  end
  return wanted, nil, reason
end

local function refuse(message, quietly)
  if not quietly then
    tell(message)
  end
  return slurm.ESLURM_ACCESS_DENIED or slurm.ERROR
end

local function submit(job_desc, part_list, submit_uid)
  local read = fields.reader(job_desc, fields.DESC)
  local token, malformed, max = M.parse_comment(read("comment"))
  local wants = token ~= nil or malformed ~= nil
  local asked = request.of(read)
  local shards, gpus = request.asks_for_shards(asked), request.asks_for_gpus(read, asked)
  if not (wants or shards or gpus) then
    return slurm.SUCCESS
  end
  local settings, why = conf.current()
  if not settings then
    log("conf", why)
    return slurm.SUCCESS
  end
  local list, shared = partitions_of(read("partition"), part_list, settings)
  if shards and shared > 0 and settings.raw_shards == "deny" and not is_privileged(submit_uid) then
    return refuse("shards are given out by gpushare here. Ask for --gres=gpu:1 and --comment=gpushare:TOKEN instead.")
  end
  local reason = malformed
  if shared == 0 or shared < #list then
    reason = "its partitions do not all share GPUs"
  elseif gpus then
    local typed = request.without_model(asked, settings.gpu_model, read("features"))
    if typed then
      fields.apply(job_desc, typed)
      asked = request.of(read)
    end
    if typed == false then
      reason = "write the GPU's type into the constraint yourself (--gres=gpu:1 -C ...)"
      wants = true
    else
      local wanted, line, not_shared = decide(job_desc, read, asked, settings, list, token, max)
      if wanted then
        fields.apply(job_desc, wanted)
      end
      if line then
        tell(line)
      end
      reason = malformed or not_shared
    end
  else
    reason = reason or "it asks for no GPU"
  end
  if wants and reason then
    tell("not shared: " .. reason .. ". The job runs as written.")
  end
  return slurm.SUCCESS
end

local function modify(job_desc, job_rec, part_list, modify_uid)
  if is_privileged(modify_uid) then
    return slurm.SUCCESS
  end
  local settings, why = conf.current()
  if not settings then
    log("conf", why)
    return slurm.SUCCESS
  end
  local read = fields.reader(job_desc, fields.DESC)
  local record = fields.reader(job_rec, fields.RECORD)
  local tag = (" " .. (record("admin_comment") or "")):match("%sGS1:(%S*)")
  local list, shared = partitions_of(read("partition") or record("partition"), part_list, settings)
  local asked = request.of(read)
  local shards, gpus = request.asks_for_shards(asked), request.asks_for_gpus(read, asked)
  local quietly = settings.slurm_version and settings.slurm_version < M.MODIFY_MESSAGE
  if read("admin_comment") then
    return refuse("only administrators write AdminComment.", quietly)
  elseif shards and shared > 0 and settings.raw_shards == "deny" then
    return refuse("shards are given out by gpushare here.", quietly)
  elseif tag and tag:match("^c=") then
    -- The request and the node say which card it is: both are the helper's to change.
    local nodes = math.max(read("min_nodes") or 1, read("max_nodes") or 1)
    if shards or gpus or read("req_nodes") or nodes > 1 then
      return refuse("a shared job's GPU cannot be changed by hand. Submit it again without the token.", quietly)
    end
  elseif gpus and shared > 0 and shared == #list then
    local typed = request.without_model(asked, settings.gpu_model, read("features") or record("features"))
    if typed then
      fields.apply(job_desc, typed)
    end
  end
  return slurm.SUCCESS
end

local function guarded(step, ...)
  local ok, result = pcall(step, ...)
  if ok then
    return result
  end
  pcall(log, "fault", tostring(result))
  return slurm.SUCCESS
end

function M.job_submit(job_desc, part_list, submit_uid)
  return guarded(submit, job_desc, part_list, submit_uid)
end

function M.job_modify(job_desc, job_rec, part_list, modify_uid)
  return guarded(modify, job_desc, job_rec, part_list, modify_uid)
end

return M
