-- slurm-gpushare in slurmctld (job_submit/lua): turns `sbatch --comment=gpushare:TOKEN` into a tagged, shareable job.
-- `gpushare configure` writes this file with its modules and the site's GPU models in it; as it is here it loads them from
-- beside it. It runs under slurmctld's locks: no write but to the job, no subprocess, no network, no look at other jobs.
-- What a job asks for may be hostile: no field is taken apart that is longer than Slurm accepts. Whatever breaks, the job
-- goes on as its user wrote it, and slurmctld's log gets a line. Lua 5.1 to 5.4 (docs/hook.md).

local site = { models = {} } --@site
local modules = {} --@modules

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local loaded = {}

local function load(name)
  if loaded[name] == nil then
    loaded[name] = (modules[name] or assert(loadfile(here .. name .. ".lua")))(load, site)
  end
  return loaded[name]
end

local jobs, request, share, sites, slurm_uid, since

local ready, not_ready = pcall(function()
  jobs, request, share = load("gpushare_job"), load("gpushare_request"), load("gpushare_share")
  sites, since = load("gpushare_site"), load("gpushare_protocol").SINCE
  -- slurmctld runs as SlurmUser, and so does the helper.
  slurm_uid = tonumber((jobs.text_of("/proc/self/status") or ""):match("Uid:%s+%d+%s+(%d+)") or "0")
end)

local LOG_SECONDS = 60
local last_logged = {}

-- One line a minute of each kind: a fault that hits every submission must not fill the log.
local function log(kind, message)
  if math.abs(os.time() - (last_logged[kind] or -LOG_SECONDS)) >= LOG_SECONDS then
    last_logged[kind] = os.time()
    slurm.log_error("%s", "gpushare: " .. message:sub(1, 300):gsub("[%c]", " "))
  end
end

local function tell(message)
  if message then
    slurm.log_user("%s", "gpushare: " .. message)
  end
end

local function refuse(message, quietly)
  if not quietly then
    tell(message)
  end
  return slurm.ESLURM_ACCESS_DENIED or slurm.ERROR
end

local function is_privileged(uid)
  return uid == 0 or uid == slurm_uid
end

-- gpushare.conf, and a line in the log where it cannot be read: then the last good settings stay in force. Without
-- any no job shares, and all else works as far as it can.
local function current_settings()
  local settings, why = sites.settings()
  if why then
    log("conf", why .. (settings and "; the last good settings stay in force" or ""))
  end
  return settings
end

local function denies_shards(place, settings)
  return place.ours and settings and settings.raw_shards == "deny"
end

-- Submissions.

local TOO_LONG = "a request for GPUs of more than %d characters is refused."
local RAW_SHARDS = "shards are given out by gpushare here. Ask for --gres=gpu:1 and --comment=gpushare:TOKEN instead."
local CONSTRAINT = "write the GPU's type into the constraint yourself (--gres=gpu:1 -C ...)"

-- gpu:MODEL as the user wrote it -> gpu and the model as a feature. Whether it can be understood (a constraint may be in
-- the way), and whether the job was changed.
local function rewrite_model(job_desc, asked, settings, features)
  local typed = request.without_model(asked, sites.models(settings), "features", features)
  if typed then
    jobs.apply(job_desc, typed)
  end
  return typed ~= false, typed ~= nil
end

-- Tags a job that asks for one GPU, or for all of a node, where all its partitions share. The reason for which it does
-- not share, or nil.
local function take_part(job, settings, part_list, consent)
  if consent then
    job.models = sites.possible_models(job.partitions, part_list, settings, job.read("features"))
    job.most_cpus = consent.cpus_auto and sites.most_cpus(part_list, job.partitions) or nil
  end
  local found = share.decide(job, settings, consent)
  if found.fault then
    log("store", found.fault)
  end
  if found.wanted then
    jobs.apply(job.desc, found.wanted, found.for_script)
  end
  if not job.is_doomed then
    tell(found.line)
    tell(found.cpus_line)
  end
  return found.reason
end

-- Whether Slurm will refuse the job, as far as can be seen from here: it asks for more GPUs of a node than there are, or for
-- a partition that is not there for this user. Then Slurm has the word, and nobody is told that the job runs or shares.
local function is_doomed(asked, place, part_list, settings)
  local doomed = false
  for _, name in ipairs(place.list) do
    doomed = doomed or (part_list or {})[name] == nil
  end
  for field, items in pairs(asked) do
    for _, item in ipairs(field ~= "tres_per_job" and items or {}) do
      doomed = doomed or item.name == "gpu" and (item.count or 0) > settings.gpus_per_node
    end
  end
  return doomed
end

-- What becomes of a job that asks for `gpus` or whose comment speaks of us: the model is rewritten, and the job shares
-- where it may. The reason for which it does not, if there is one, and whether its user must know even without a token.
local function rewrite(job, gpus, settings, place, part_list, consent)
  local understood, rewritten = true, false
  if gpus and place.ours then
    understood, rewritten = rewrite_model(job.desc, job.asked, settings, job.read("features"))
  end
  if not understood then
    return CONSTRAINT, true
  elseif not settings then
    return "sharing is not available now"
  elseif not place.all_shared then
    return "its partitions do not all share GPUs"
  elseif not gpus then
    return "it asks for no GPU"
  elseif rewritten then
    job.read = jobs.reader(job.desc, jobs.DESC)
    job.asked = request.of(job.read)
  end
  return take_part(job, settings, part_list, consent)
end

local function submit(job_desc, part_list, submit_uid)
  local read = jobs.reader(job_desc, jobs.DESC)
  local speaks, too_long = request.speaks_of_gpus(read)
  if too_long then
    return refuse(TOO_LONG:format(jobs.LONGEST))
  end
  local consent, malformed = jobs.consent(read("comment"))
  local answer = consent ~= nil or malformed ~= nil
  if not (answer or speaks) then
    return slurm.SUCCESS -- most jobs of most sites: nothing is taken apart for them
  end
  local asked = request.of(read)
  local kinds = request.kinds(asked)
  local gpus = kinds.gpus or (read("ntasks_per_tres") or 0) > 0
  if not (answer or kinds.shards or gpus) then
    return slurm.SUCCESS
  end
  local settings = current_settings()
  local place = sites.place(read("partition"), part_list, settings)
  if kinds.shards and denies_shards(place, settings) and not is_privileged(submit_uid) then
    return refuse(RAW_SHARDS)
  end
  local job = { desc = job_desc, read = read, asked = asked, partitions = place.list }
  job.is_doomed = settings and is_doomed(asked, place, part_list, settings)
  local reason, must_know = rewrite(job, gpus, settings, place, part_list, consent)
  reason = malformed or reason
  if reason and (must_know or (answer and not job.is_doomed)) then
    tell("not shared: " .. reason .. ". The job runs as written.")
  end
  return slurm.SUCCESS
end

-- Changes of a waiting job. What the helper decides for a shared job stays, and nobody gets shards by a change.

local NICE_OFFSET = 2147483648 -- how Slurm keeps a nice value of 0

local function gives_any(given, list)
  for _, field in ipairs(list) do
    if given(field) then
      return true
    end
  end
  return false
end

local TASKS = { "num_tasks", "cpus_per_task", "ntasks_per_node", "ntasks_per_tres" }
local SIZES = { "min_cpus", "min_mem_per_node", "min_mem_per_cpu" }

-- What a change of the comment means for a job that may share: "out" if its owner opts out, "new" if it says anything
-- that a tagged job cannot follow, else nil.
local function new_comment(change, tag)
  if not change.is_given("comment") then
    return nil
  end
  local consent, malformed = jobs.consent(change.read("comment"))
  if not consent and not malformed then
    return "out"
  elseif consent and consent.token == tag("token") and consent.max == tonumber(tag("max_isd_pct")) then
    return nil
  end
  return "new"
end

-- Writes what a job becomes whose owner opts out (docs/hook.md). The old request is set to 0, since Slurm takes an empty
-- one for unchanged. A user's change may not make the nice value negative; what an administrator gave, the helper puts
-- back. False where this Slurm cannot change the request so.
local function leave_sharing(change, tag, settings)
  local can_change = settings and settings.slurm_version >= since.gpu_becomes_shard and not share.is_stale(settings)
  if not can_change or tag("original") ~= "gpu:1" then
    return false
  end
  local prefix = share.prefix(settings)
  local wanted = { tres_per_node = prefix .. "gpu:0", tres_per_job = prefix .. "gpu:1" }
  wanted.req_nodes = tag("placed") and tag("nodes")
  wanted.begin_time = tag("lease") and os.time()
  local nice = tonumber(tag("nice"))
  if nice and not change.read("nice") then
    wanted.nice = NICE_OFFSET + math.max(0, nice)
  end
  jobs.apply(change.desc, wanted)
  return true
end

-- Why a user may not change a shared job so; nil if that may be. A job whose owner opts out is written as it leaves.
local function refusal_if_shared(change, tag, place, settings)
  local read, is_given = change.read, change.is_given
  local comment, limit = new_comment(change, tag), read("time_limit")
  -- Who opts out may take the helper's node off as well: a hook cannot, Slurm takes its empty text for unchanged.
  local nodes = is_given("req_nodes") and not (comment == "out" and not read("req_nodes"))
  local longer = limit ~= nil and limit > (change.record("time_limit") or 0)
  if nodes or gives_any(is_given, request.FIELDS) or math.max(read("min_nodes") or 1, read("max_nodes") or 1) > 1 then
    return "a shared job's GPU cannot be changed by hand. Submit it again without the token."
  elseif read("partition") and not place.all_shared then
    -- Its nodes may be the same, but nobody would measure it there.
    return "a shared job stays in partitions that share GPUs. Submit it again without the token."
  elseif tag("placed") and (longer or gives_any(read, TASKS) or gives_any(read, SIZES)) then
    -- It goes ahead of everybody, because it is short and fits. In a moment it runs, or waits again as it was.
    return "this job has been given a GPU and is about to start: it cannot become larger now."
  elseif tag("gang") and gives_any(read, TASKS) then
    return "the tasks of a job that shares all GPUs of a node cannot be changed. Submit it again."
  elseif read("pn_min_cpus") then
    return "--mincpus of a shared job cannot be changed. Submit it again without the token."
  elseif comment == "new" then
    return "the token and max= of a submitted job stay. Take the comment off to opt out."
  elseif comment == "out" and tag("original") and not leave_sharing(change, tag, settings) then
    return "this job cannot be taken out of sharing any more. Cancel it and submit it again."
  end
  return nil
end

-- Why a user may not change a job so; nil if that may be. `change` has the descriptor `desc`, `read` and `is_given` of it,
-- the `record` of the job as it is, and the `kinds` of what is asked for. `settings` are nil where there are none.
local function refusal(change, place, settings)
  local read, record, kinds = change.read, change.record, change.kinds
  local text = jobs.tag(record("admin_comment"))
  local function tag(field)
    return jobs.tag_field(text, field)
  end
  if read("admin_comment") then
    return "only administrators write AdminComment."
  elseif text and tag("cluster") and not record("tres_per_job") then -- who has left sharing asks per job
    return refusal_if_shared(change, tag, place, settings)
  elseif denies_shards(place, settings) then
    -- A job with part of a card, which no hook has seen, may not come to nodes that share either.
    local brought = read("partition") and request.kinds(request.of(record), settings.shards_per_gpu).part
    if brought or kinds.shards then
      return "shards are given out by gpushare here."
    end
  end
  if place.ours and kinds.unclear then
    return "this change of GPUs is not understood. Write it as gres/gpu:1 or gres/gpu:TYPE:1."
  end
  return nil
end

local function modify(job_desc, job_rec, part_list, modify_uid)
  if is_privileged(modify_uid) then
    return slurm.SUCCESS
  end
  local read, is_given = jobs.reader(job_desc, jobs.DESC)
  local speaks, too_long = request.speaks_of_gpus(read)
  local settings = current_settings()
  -- Slurm drops what a refused change says before that release, with an error in its log each time.
  local quietly = not settings or settings.slurm_version < since.explains_refusals
  if too_long then
    return refuse(TOO_LONG:format(jobs.LONGEST), quietly)
  end
  local record = jobs.reader(job_rec, jobs.RECORD)
  local place = sites.place(read("partition") or record("partition"), part_list, settings)
  local asked = request.of(read)
  local change = { desc = job_desc, read = read, is_given = is_given, record = record, kinds = request.kinds(asked) }
  local why = refusal(change, place, settings)
  if why then
    return refuse(why, quietly)
  elseif place.ours and speaks then
    rewrite_model(job_desc, asked, settings, read("features") or record("features"))
  end
  return slurm.SUCCESS
end

-- What Slurm calls. A site's own script may have defined these before it runs this file: its functions have the first word.
local their_submit, their_modify = slurm_job_submit, slurm_job_modify

local function first_theirs(theirs, ours, ...)
  local result = theirs and theirs(...) or slurm.SUCCESS
  if result ~= slurm.SUCCESS or not ready then
    return result
  end
  local ok, answer = pcall(ours, ...)
  if not ok then
    pcall(log, "fault", tostring(answer))
  end
  return ok and answer or slurm.SUCCESS
end

function slurm_job_submit(...)
  return first_theirs(their_submit, submit, ...)
end

function slurm_job_modify(...)
  return first_theirs(their_modify, modify, ...)
end

if not ready then
  slurm.log_error("%s", "gpushare: not loaded: " .. tostring(not_ready))
end

return slurm.SUCCESS, load, site -- the last two for tests
