-- What a job that asks for one GPU, or for all GPUs of a node, becomes: tagged, measured, or as it was.

local load, site = ...
local fields = load("gpushare_fields")
local gangs = load("gpushare_gang")
local singles = load("gpushare_single")
local since = load("gpushare_protocol").SINCE
local store = load("gpushare_store")
local tags = load("gpushare_tag")

local M = {}

-- How this release writes a GRES in a request.
function M.prefix(settings)
  return settings.slurm_version < since.writes_gres_with_slash and "gres:" or "gres/"
end

-- Whether single GPUs are asked for as shards here, whoever asks.
local function is_old(settings)
  return settings.slurm_version < since.keeps_whole_gpus_apart
end

-- Whether the helper has found another Slurm than the one that configure knew: requests must not be written then.
function M.is_stale(settings)
  local ok, found = pcall(store.look_up, settings.hook_file)
  return ok and found.stale
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

-- DefCpuPerGPU and DefMemPerGPU of the job's partitions, nil where they have none. false and the reason if they differ.
local function defaults(settings, list)
  local cpus = common_default(settings.def_cpu_per_gpu, list)
  local mem_mib = common_default(settings.def_mem_per_gpu_mib, list)
  if cpus == false or mem_mib == false then
    return false, "its partitions have different defaults per GPU"
  end
  return cpus, mem_mib
end

local turn = 0

-- Where the site's release can only retarget typed shards, jobs are spread over the model's indices from the start.
local function next_index(model, settings)
  turn = turn + 1
  return turn % (site.gpus and site.gpus[model] or settings.gpus_per_node)
end

-- Whether --mincpus is a wish of its own: the helper counts the CPUs of the job's tasks, and would send it to a node
-- with too few. sbatch repeats -c there.
local function asks_for_more_cpus(read)
  local tasks = math.max(1, read("num_tasks") or 1) * math.max(1, read("cpus_per_task") or 1)
  return (read("pn_min_cpus") or 0) > math.max(tasks, read("min_cpus") or 1)
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
  elseif asks_for_more_cpus(read) then
    return "--mincpus asks for more CPUs of the node than the job's tasks have"
  elseif not fields.is_batch(job_desc) then
    return "only sbatch jobs share"
  end
  return nil
end

-- The request per node of a job on one GPU, without prefix. `known` is what the store knows of the workload of a job that
-- is to be tagged; `mem_mib` its partitions' DefMemPerGPU.
local function per_node(settings, single, known, mem_mib)
  if single.type then
    return string.format("shard:%s:%d", single.type, settings.shards_per_gpu)
  elseif known and settings.slurm_version < since.gpu_becomes_shard then
    local index = next_index(known.model, settings)
    return string.format("shard:%s_%d:%d", known.model, index, settings.shards_per_gpu)
  elseif is_old(settings) or mem_mib then
    -- A pending gpu request on a partition with DefMemPerGPU carries that default, and cannot become shards any more.
    return string.format("shard:%d", settings.shards_per_gpu)
  end
  return "gpu:1"
end

-- Everything that a job on one GPU or a gang becomes: {fields to write}, and its request per node or card without prefix.
-- nil and the reason if it cannot share. `known` is what the store knows of the workload of a job that is to be tagged.
local function shareable(job, settings, asks, known)
  local cpus, mem_mib = defaults(settings, job.partitions)
  if cpus == false then
    return nil, mem_mib
  elseif asks.gang then
    local wanted, reason = gangs.by_card(job.read, asks.gang, settings.shards_per_gpu, cpus, mem_mib)
    return wanted, wanted and string.format("shard:%d", settings.shards_per_gpu) or reason
  end
  local wanted, reason = singles.carry_along(job.read, asks.single, cpus, mem_mib)
  if not wanted then
    return nil, reason
  end
  local what = per_node(settings, asks.single, known, mem_mib)
  local prefix = asks.single.prefix or M.prefix(settings)
  return singles.per_node(job.read, asks.single, wanted, prefix, what), what
end

-- The tag of a known workload's job on `gpus` GPUs that asks for `what`. `leased`: whether it waits for the helper.
local function shared_tag(read, what, known, consent, gpus, leased)
  return tags.write({
    cluster = known.cluster,
    token = consent.token,
    original = what,
    gang = gpus > 1 and gpus or nil,
    nodes = read("req_nodes"),
    lease = leased and 1 or nil,
    max_isd_pct = consent.max,
    -- The owner's own words; what a site sets for everybody (JobRequeue=1) is not in the submission.
    requeue = (consent.requeue or (consent.requeue == nil and read("requeue") == 1)) and 1 or nil,
  })
end

M.PROBED = "first run of this workload: it gets a whole GPU and is measured. Later runs may share."
M.PROBED_NODE = "first run of this workload on a whole node: it has the node alone and is measured. Later runs may share."
M.SHARED = "this job may share its GPU with another. To have a GPU alone, leave out --comment=gpushare:..."
M.LEASED = "this job may share its GPU with another; finding one may take %d s of its waiting time. "
  .. "To have a GPU alone, leave out --comment=gpushare:..."

M.SHARED_NODE = "this job may share its node with another that wants all of its GPUs. "
  .. "To have the node alone, leave out --comment=gpushare:..."

M.NO_CURVE = "cpus=auto: how many CPUs this workload needs is not known, so they stay as written. "
  .. "Measure it with: gpushare profile --cpus 2,4,8 -- COMMAND"
M.REPEATED = "cpus=auto: srun would repeat --cpus-per-gpu, or -c with --gpus-per-task, so the CPUs stay as written."
M.GANG = "cpus=auto: of a job on several GPUs the CPUs stay as written."
M.CURVE = "cpus=auto: %d CPUs instead of %d, as measured for this workload."
M.CURVE_CUT = "cpus=auto: %d CPUs instead of %d: %d were measured to be enough, but the partition allows no more."
M.SAME_CPUS = "cpus=auto: %d CPUs, as written, are what was measured for this workload."
M.MEMORY_UNSAID = "cpus=auto: %d CPUs are enough as measured, but the memory may depend on them, so %d stay as written. "
  .. "Say how much it needs with --mem."

M.SHADOWED = "this job is measured and runs as written: this site only works out what sharing would do."

M.AWAY = "sharing is not running now"

-- The first of `models` in the alphabet on which the workload was measured on so many GPUs, nil if there is none.
local function measured_on(models, found, gpus)
  local first
  for model in pairs(models) do
    if found.clusters[model] and found.gpus[model] == gpus and (not first or model < first) then
      first = model
    end
  end
  return first
end

M.STALE = "Slurm was upgraded, and gpushare is not set up for it yet"

-- How it stands with the token on one of the models that the job may get, for a job on `gpus` GPUs of this user:
-- {status = "known", cluster, model, cpus}, {status = "away"} for a known one while no helper is alive, {status = "unknown"}
-- for one that was not measured so; {status = "none", reason, fault = what broke, stale} where nothing can be said.
local function workload_of(read, settings, models, token, gpus)
  if settings.policy == "off" then
    return { status = "none", reason = "sharing is switched off" }
  end
  local ok, found = pcall(store.look_up, settings.hook_file, token)
  if not ok then
    return { status = "none", reason = "sharing is not available now", fault = tostring(found) }
  elseif found.stale then
    return { status = "none", reason = M.STALE, stale = true }
  end
  local away = math.abs(os.time() - (found.heartbeat_s or 0)) > settings.heartbeat_s
  if gpus > 1 and (away or not found.gangs) then
    -- Slurm tells a prolog only the last of a job's GPUs, so that a gang as it was written cannot be measured.
    return { status = "none", reason = away and M.AWAY or "this Slurm is not set up for sharing whole nodes" }
  end
  -- Somebody else's token, or one on another number of GPUs, looks exactly like one that was never seen.
  local model = found.uid == read("user_id") and measured_on(models, found, gpus)
  if not model then
    return { status = "unknown" }
  elseif away then
    return { status = "away" }
  end
  return { status = "known", model = model, cluster = found.clusters[model], cpus = found.cpus }
end

-- The request for one GPU, if the job has just that, and the reason for which it does not share, if there is one.
local function one_gpu(read, asked, settings)
  local single, reason = singles.of(read, asked)
  if single and single.type then
    if not settings.gpu_models[single.type:match("^(.*)_%d+$") or ""] then
      return nil, "it asks for a GPU of another type"
    end
    return single, "it names one GPU by its type"
  end
  return single, reason
end

-- The request for all GPUs of a node, if the job has just that and gangs may share here; else nil and the reason, if it
-- is one that the job's owner can do something about.
local function whole_node(read, asked, settings)
  if is_old(settings) or settings.share_gangs ~= "yes" or settings.policy == "shadow" then
    return nil
  end
  return gangs.of(read, asked, settings.gpus_per_node)
end

-- What cpus=auto makes of the job, added to `wanted`: as many CPUs as the workload's curve says, `most` at most where a
-- number is given. What to tell the user.
local function curve_cpus(read, single, wanted, known, most)
  if not known.cpus then
    return M.NO_CURVE
  elseif read("cpus_per_tres") or (single.per_task and read("cpus_per_task")) then
    -- On 24.11.5 plain srun fails in a job of the second form whatever its CPUs are; no second reason is added.
    return M.REPEATED
  end
  local cpus = math.min(known.cpus, most or known.cpus)
  local now, before = singles.with_cpus(read, single, wanted, cpus)
  if not now then
    return string.format(M.MEMORY_UNSAID, cpus, before)
  elseif cpus < known.cpus then
    return string.format(M.CURVE_CUT, now, before, known.cpus)
  end
  return string.format(now == before and M.SAME_CPUS or M.CURVE, now, before)
end

-- The GPUs that the job asks for, if it may share them: {single or gang, gpus}, else nil; and the reason for which it
-- does not share, if there is one.
local function asked_gpus(job, settings, consent)
  local single, reason = one_gpu(job.read, job.asked, settings)
  local gang
  if consent and not single then
    local why
    gang, why = whole_node(job.read, job.asked, settings)
    reason = not gang and (why or reason) or nil
  end
  if not (single or gang) then
    return nil, reason
  end
  local alone = left_alone(job.read, job.desc)
  if alone then
    return nil, alone
  end
  return { single = single, gang = gang, gpus = gang and gang.gpus or 1 }, reason
end

-- A job that is measured and does not share: its workload is "unknown", or known while the helper is "away" or the site
-- only works out what sharing would do. The tag says whose telemetry it is, also for a job that ends before a helper is
-- back, and of a known workload what its owner accepts.
local function measured(job, settings, asks, consent, status)
  local wanted = {}
  if asks.gang then
    local why
    wanted, why = shareable(job, settings, asks)
    if not wanted then
      return { reason = why }
    end
  elseif is_old(settings) then
    wanted = shareable(job, settings, asks) or {}
  end
  local unknown, away = status == "unknown", status == "away"
  local tag = { token = consent.token, gang = asks.gang and asks.gpus or nil, max_isd_pct = not unknown and consent.max or nil }
  wanted.admin_comment = tags.put(job.read("admin_comment"), tags.write(tag, unknown))
  local line = (asks.gang and M.PROBED_NODE) or (settings.policy == "shadow" and M.SHADOWED) or M.PROBED
  return {
    wanted = wanted,
    line = not away and line or nil,
    cpus_line = consent.cpus_auto and unknown and M.NO_CURVE or nil,
    reason = away and M.AWAY or nil,
    for_script = asks.gang and gangs.for_script(asks.gang),
  }
end

-- A known workload's job that shares.
local function shared(job, settings, asks, consent, known)
  local wanted, what = shareable(job, settings, asks, known)
  if not wanted then
    return { reason = what }
  end
  local line, cpus_line = M.SHARED, nil
  if consent.cpus_auto then
    cpus_line = asks.gang and M.GANG or curve_cpus(job.read, asks.single, wanted, known, job.most_cpus)
  end
  local now = os.time()
  local leased = (job.read("begin_time") or 0) <= now
  if leased then
    wanted.begin_time = now + settings.lease_s
    line = string.format(M.LEASED, settings.lease_s)
  end
  local tag = shared_tag(job.read, what, known, consent, asks.gpus, leased)
  wanted.admin_comment = tags.put(job.read("admin_comment"), tag)
  return {
    wanted = wanted,
    line = asks.gang and M.SHARED_NODE or line,
    cpus_line = cpus_line,
    for_script = asks.gang and gangs.for_script(asks.gang),
  }
end

-- What becomes of a job that asks for GPUs, on partitions that are all shared. `job` has its descriptor `desc`, the
-- `read` of it, what it has `asked` for, its `partitions`, the `models` that it may get there and `most_cpus` that they
-- allow. `consent` is nil for a job without a token. The answer: {wanted = {field = value}, for_script = what to tell the
-- task prolog, line = what to tell the user if it takes part, cpus_line = the same of cpus=auto, reason = why it does
-- not, fault = what broke}, each or none of it.
function M.decide(job, settings, consent)
  if not (consent or is_old(settings)) then
    return {}
  elseif fields.has_long_text(job.read) then
    return { reason = "one of its options is longer than " .. fields.LONGEST .. " characters" }
  end
  local asks, reason = asked_gpus(job, settings, consent)
  if not asks then
    return { reason = reason }
  end
  local found = { status = "none", reason = reason }
  if consent and not reason then
    found = workload_of(job.read, settings, job.models, consent.token, asks.gpus)
  end
  if found.status == "known" and settings.policy ~= "shadow" then
    return shared(job, settings, asks, consent, found)
  elseif found.status ~= "none" then
    return measured(job, settings, asks, consent, found.status)
  elseif not is_old(settings) or found.stale or M.is_stale(settings) then
    return { reason = found.reason, fault = found.fault }
  end
  local wanted, why = shareable(job, settings, asks)
  return { wanted = wanted, reason = found.reason or (not wanted and why or nil), fault = found.fault }
end

return M
