-- What a job that asks for one GPU, or for all GPUs of a node, becomes: tagged, measured, or as it was.

local load, site = ...
local gpus = load("gpushare_gpus")
local jobs = load("gpushare_job")
local since = load("gpushare_protocol").SINCE

local M = {}

-- hook.sqlite, the small file that the helper maintains: one look-up by primary key, read-only.

-- The helper's own transactions take about this long; slurmctld must not wait longer.
local BUSY_MILLISECONDS = 5

local environment

-- mode=ro: neither creates nor writes. Where SQLite takes no URIs, this names a directory "file:" that does not exist, so
-- that the worst outcome is an error.
local function uri(path)
  return "file:" .. path:gsub("%%", "%%25"):gsub("%?", "%%3F"):gsub("#", "%%23") .. "?mode=ro"
end

-- Made for each look-up, in a tenth of a millisecond: the helper may have put another file in its place.
local function open(path)
  environment = environment or require("luasql.sqlite3").sqlite3()
  local connection, why = environment:connect(uri(path), BUSY_MILLISECONDS)
  return connection or error(tostring(why))
end

local QUERY = "SELECT heartbeat_s, gangs, uid, clusters, cpus FROM helper LEFT JOIN workload ON token = '%s' WHERE id = 1"

local function query(connection, token)
  local cursor, why = connection:execute(QUERY:format(token or ""))
  if not cursor or type(cursor) == "number" then
    error(tostring(why))
  end
  local ok, heartbeat_s, gangs, uid, clusters, cpus = pcall(cursor.fetch, cursor)
  pcall(cursor.close, cursor)
  if not ok then
    error(heartbeat_s, 0)
  end
  local found = {
    heartbeat_s = tonumber(heartbeat_s) or 0,
    gangs = tonumber(gangs) == 1,
    stale = tonumber(gangs) == -1,
    uid = tonumber(uid),
    clusters = {},
    gpus = {},
    memory = {},
    cpus = tonumber(cpus),
  }
  -- "MODEL=CLUSTER/GPUS/MIB,...": where the workload was measured, on how many GPUs, and what it may take of one's memory.
  for model, cluster, count, mib in (clusters or ""):gmatch("([^,=]+)=(%d+)/?(%d*)/?(%d*)") do
    found.clusters[model], found.gpus[model], found.memory[model] = tonumber(cluster), tonumber(count) or 1, tonumber(mib)
  end
  return found
end

-- What is known of `token`, if it is given: {uid, clusters, gpus and memory by model, cpus = those that its curve says}; and of
-- the helper: {heartbeat_s, gangs = whether they may share, stale = whether Slurm is another one than configure found}. Raises.
function M.look_up(path, token)
  assert(token == nil or jobs.is_token(token), "not a token")
  local connection = open(path)
  local ok, found = pcall(query, connection, token)
  pcall(connection.close, connection)
  return ok and found or error(found, 0)
end

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
  local ok, found = pcall(M.look_up, settings.hook_file)
  return ok and found.stale
end

-- The partitions' common default.
local function common_default(defaults, list)
  local value = defaults[list[1]]
  for _, name in ipairs(list) do
    if defaults[name] ~= value then
      gpus.cannot("its partitions have different defaults per GPU")
    end
  end
  return value
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

-- Jobs that are none of our business although they ask for one GPU.
local function must_be_ours(read, job_desc)
  if read("het_job_offset") then
    gpus.cannot("heterogeneous jobs are left alone")
  elseif read("clusters") then
    gpus.cannot("jobs sent to other clusters (-M) are left alone")
  elseif (read("immediate") or 0) ~= 0 then
    gpus.cannot("--immediate jobs are left alone")
  elseif read("shared") and read("shared") ~= 1 then
    gpus.cannot("--exclusive asks for the whole node")
  elseif asks_for_more_cpus(read) then
    gpus.cannot("--mincpus asks for more CPUs of the node than the job's tasks have")
  elseif not jobs.is_batch(job_desc) then
    gpus.cannot("only sbatch jobs share")
  end
end

-- The request per node, or per card of a gang, without prefix. `known` is what the store knows of the workload of a job
-- that is to be tagged; `mem_mib` its partitions' DefMemPerGPU.
local function per_node(settings, asks, known, mem_mib)
  local shards = settings.shards_per_gpu
  if asks.type then
    return string.format("shard:%s:%d", asks.type, shards)
  elseif known and settings.slurm_version < since.gpu_becomes_shard then
    return string.format("shard:%s_%d:%d", known.model, next_index(known.model, settings), shards)
  elseif is_old(settings) or mem_mib or asks.gpus > 1 then
    -- A pending gpu request on a partition with DefMemPerGPU carries that default, and cannot become shards any more.
    return string.format("shard:%d", shards)
  end
  return "gpu:1"
end

-- Everything that a job on one GPU or a gang becomes: {fields to write}, and its request per node or card without prefix.
-- `known` is what the store knows of the workload of a job that is to be tagged.
local function shareable(job, settings, asks, known)
  local cpus = common_default(settings.def_cpu_per_gpu, job.partitions)
  local mem_mib = common_default(settings.def_mem_per_gpu_mib, job.partitions)
  local wanted, what = gpus.carry_along(job.read, asks, cpus, mem_mib), per_node(settings, asks, known, mem_mib)
  gpus.ask_for(job.read, asks, wanted, asks.prefix or M.prefix(settings), what)
  return wanted, what
end

local LEAVE_OUT = "To have %s alone, leave out --comment=gpushare:..."
local PROBED = "first run of this workload: it gets a whole GPU and is measured. Runs submitted after that may share."
local PROBED_LATER = "first run of this workload: it gets a whole GPU and is measured. "
  .. "Whatever still waits when that is done may share."
local PROBED_NODE = "first run of this workload on a whole node: it has the node alone and is measured. Later runs may share."
local SHARED = "this job may share its GPU with another. " .. LEAVE_OUT:format("a GPU")
local LEASED = "this job may share its GPU with another; finding one may take %d s of its waiting time. "
  .. LEAVE_OUT:format("a GPU")
local SHARED_NODE = "this job may share its node with another that wants all of its GPUs. " .. LEAVE_OUT:format("the node")
local SHADOWED = "this job is measured and runs as written: this site only works out what sharing would do."
local AWAY = "sharing is not running now"
local STALE = "Slurm was upgraded, and gpushare is not set up for it yet"

local NO_CURVE = "cpus=auto: how many CPUs this workload needs is not known, so they stay as written. "
  .. "Measure it with: gpushare profile --cpus 2,4,8 -- COMMAND"
local REPEATED = "cpus=auto: srun would repeat --cpus-per-gpu, or -c with --gpus-per-task, so the CPUs stay as written."
local IN_STEPS = "inside this job write srun -c %d, not srun --cpus-per-gpu: a shared GPU cannot carry that option."
local GANG = "cpus=auto: of a job on several GPUs the CPUs stay as written."
local CURVE = "cpus=auto: %d CPUs instead of %d, as measured for this workload."
local CURVE_CUT = "cpus=auto: %d CPUs instead of %d: %d were measured to be enough, but the partition allows no more."
local SAME_CPUS = "cpus=auto: %d CPUs, as written, are what was measured for this workload."
local MEMORY_UNSAID = "cpus=auto: %d CPUs are enough as measured, but the memory may depend on them, so %d stay as written. "
  .. "Say how much it needs with --mem."

-- The first of `models` in the alphabet on which the workload was measured on so many GPUs, nil if there is none.
local function measured_on(models, found, count)
  local first
  for model in pairs(models) do
    if found.clusters[model] and found.gpus[model] == count and (not first or model < first) then
      first = model
    end
  end
  return first
end

-- How it stands with the token on one of the models that the job may get, for a job on `count` GPUs of this user:
-- {status = "known", cluster, model, cpus, memory}, {status = "away"} for a known one while no helper is alive, {status = "unknown"}
-- for one that was not measured so; {status = "none", reason, fault = what broke, stale} where nothing can be said.
local function workload_of(job, settings, token, count)
  if settings.policy == "off" then
    return { status = "none", reason = "sharing is switched off" }
  end
  local ok, found = pcall(M.look_up, settings.hook_file, token)
  if not ok then
    return { status = "none", reason = "sharing is not available now", fault = tostring(found) }
  elseif found.stale then
    return { status = "none", reason = STALE, stale = true }
  end
  local away = math.abs(os.time() - found.heartbeat_s) > settings.heartbeat_s
  if count > 1 and (away or not found.gangs) then
    -- Slurm tells a prolog only the last of a job's GPUs, so that a gang as it was written cannot be measured.
    return { status = "none", reason = away and AWAY or "this Slurm is not set up for sharing whole nodes" }
  end
  if found.uid and found.uid ~= job.read("user_id") then
    return { status = "none", reason = "its token is another user's. Make one of your own with: gpushare token NAME" }
  end
  local model = found.uid and measured_on(job.models, found, count)
  if not model then
    return { status = "unknown", away = away }
  elseif away then
    return { status = "away" }
  end
  local memory = settings.mps ~= "off" and found.memory[model] or nil
  return { status = "known", model = model, cluster = found.clusters[model], cpus = found.cpus, memory = memory }
end

-- The request for one GPU, if the job has just that, and the reason for which it does not share, if there is one.
local function one_gpu(job, settings)
  local single = gpus.single(job.read, job.asked)
  if single.type and not settings.gpu_models[single.type:match("^(.*)_%d+$") or ""] then
    gpus.cannot("it asks for a GPU of another type")
  end
  return single, single.type and "it names one GPU by its type" or nil
end

-- The GPUs that the job asks for (`asks` of gpushare_gpus.lua), and the reason for which it does not share them, if there
-- is one that its owner can do something about.
local function asked_gpus(job, settings, consent)
  local asks, reason = gpus.attempt(one_gpu, job, settings)
  local gangs_share = settings.share_gangs == "yes" and settings.policy ~= "shadow" and not is_old(settings)
  if not asks and consent and gangs_share then
    asks = gpus.gang(job.read, job.asked, settings.gpus_per_node)
  end
  if not asks then
    gpus.cannot(reason)
  end
  must_be_ours(job.read, job.desc)
  return asks, asks.gpus == 1 and reason or nil
end

-- What cpus=auto makes of the job, added to `wanted`: as many CPUs as the workload's curve says, `most` at most where a
-- number is given. What to tell the user.
local function curve_cpus(read, asks, wanted, known, most)
  if asks.gpus > 1 then
    return GANG
  elseif not known.cpus then
    return NO_CURVE
  elseif read("cpus_per_tres") or (asks.per_task and asks.cpus) then
    -- On 24.11.5 plain srun fails in a job of the second form whatever its CPUs are; no second reason is added.
    return REPEATED
  end
  local cpus = math.min(known.cpus, most or known.cpus)
  local now, before = gpus.with_cpus(read, asks, wanted, cpus)
  if not now then
    return MEMORY_UNSAID:format(cpus, before)
  elseif cpus < known.cpus then
    return CURVE_CUT:format(now, before, known.cpus)
  end
  return (now == before and SAME_CPUS or CURVE):format(now, before)
end

-- The owner's own words; what a site sets for everybody (JobRequeue=1) is not in the submission.
local function may_be_requeued(job, consent)
  return (consent.requeue or (consent.requeue == nil and job.read("requeue") == 1)) and 1 or nil
end

-- What a first run on one GPU becomes that can share if it still waits when its workload is known: {fields to write}, and
-- its request, as of `shareable`. nil where the helper could not change it: before that release, where something comes
-- with each GPU (options, or DefMemPerGPU, which a waiting request for a GPU carries), and for a GPU of each task.
local function may_wait(job, settings, asks)
  local read = job.read
  local plain = not (asks.per_gpu or asks.per_task or read("cpus_per_tres") or read("mem_per_tres") or read("tres_bind"))
  if settings.slurm_version < since.gpu_becomes_shard or settings.policy == "shadow" or not plain then
    return nil
  elseif not is_old(settings) and common_default(settings.def_mem_per_gpu_mib, job.partitions) then
    return nil
  end
  return shareable(job, settings, asks)
end

-- A job that is measured and does not share: its workload is unknown (`found` of `workload_of` says so), or known while
-- the helper is away or the site only works out what sharing would do. The tag says whose telemetry it is, also for a job
-- that ends before a helper is back, and of a workload that is known, or may be in time, what its owner accepts.
local function measured(job, settings, asks, consent, found)
  local unknown, away = found.status == "unknown", found.status == "away"
  local wanted, what
  if asks.gpus > 1 then
    wanted = shareable(job, settings, asks)
  elseif unknown and not found.away then
    wanted, what = gpus.attempt(may_wait, job, settings, asks)
    what = wanted and what -- else it is a reason
  end
  if not wanted and is_old(settings) then
    wanted = gpus.attempt(shareable, job, settings, asks)
  end
  wanted = wanted or {}
  local tag = { token = consent.token, original = what, gang = asks.gpus > 1 and asks.gpus or nil }
  if what or not unknown then
    tag.max_isd_pct, tag.requeue = consent.max, what and may_be_requeued(job, consent)
  end
  wanted.admin_comment = jobs.with_tag(job.read("admin_comment"), tag, unknown)
  local probed = settings.policy == "shadow" and SHADOWED or (what and PROBED_LATER or PROBED)
  local line = asks.gpus > 1 and PROBED_NODE or probed
  return {
    wanted = wanted,
    line = not away and line or nil,
    cpus_line = consent.cpus_auto and unknown and NO_CURVE or nil,
    reason = away and AWAY or nil,
    for_script = gpus.for_script(asks),
  }
end

-- A known workload's job that shares.
local function shared(job, settings, asks, consent, known)
  local wanted, what = shareable(job, settings, asks, known)
  local lasts = job.read("cpus_per_tres") and settings.slurm_version >= since.writes_gres_with_slash
  local cpus_line = lasts and IN_STEPS:format(wanted.cpus_per_task) or nil
  if consent.cpus_auto then
    cpus_line = curve_cpus(job.read, asks, wanted, known, job.most_cpus)
  end
  local now = os.time()
  local leased = (job.read("begin_time") or 0) <= now
  if leased then
    wanted.begin_time = now + settings.lease_s
  end
  wanted.admin_comment = jobs.with_tag(job.read("admin_comment"), {
    cluster = known.cluster,
    token = consent.token,
    original = what,
    gang = asks.gpus > 1 and asks.gpus or nil,
    nodes = job.read("req_nodes"),
    lease = leased and 1 or nil,
    max_isd_pct = consent.max,
    requeue = may_be_requeued(job, consent),
  })
  return {
    wanted = wanted,
    line = (asks.gpus > 1 and SHARED_NODE) or (leased and LEASED:format(settings.lease_s)) or SHARED,
    cpus_line = cpus_line,
    for_script = gpus.for_script(asks, known.memory),
  }
end

local function what_becomes(job, settings, consent)
  local asks, reason = asked_gpus(job, settings, consent)
  local found = { status = "none", reason = reason }
  if consent and not reason then
    found = workload_of(job, settings, consent.token, asks.gpus)
  end
  if found.status == "known" and settings.policy ~= "shadow" then
    return shared(job, settings, asks, consent, found)
  elseif found.status ~= "none" then
    return measured(job, settings, asks, consent, found)
  elseif not is_old(settings) or found.stale or M.is_stale(settings) then
    return { reason = found.reason, fault = found.fault }
  end
  local wanted, why = gpus.attempt(shareable, job, settings, asks)
  return { wanted = wanted, reason = found.reason or why, fault = found.fault }
end

-- What becomes of a job that asks for GPUs, on partitions that are all shared. `job` is {desc, read, asked, partitions,
-- models, most_cpus} as job_submit.lua makes it; `consent` is nil without a token. The answer: {wanted = {field = value},
-- for_script = what to tell the task prolog, line and cpus_line = what to tell the user, reason = why it does not take
-- part, fault = what broke}, each or none of it.
function M.decide(job, settings, consent)
  if not (consent or is_old(settings)) then
    return {}
  elseif jobs.has_long_text(job.read) then
    return { reason = "one of its options is longer than " .. jobs.LONGEST .. " characters" }
  end
  local found, reason = gpus.attempt(what_becomes, job, settings, consent)
  return found or { reason = reason }
end

return M
