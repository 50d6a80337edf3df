-- slurm-gpushare in slurmctld: turns `sbatch --comment=gpushare:TOKEN` into a tagged, shareable job.
--
-- job_submit.lua loads this and calls `job_submit` and `job_modify`. Both run under
-- slurmctld's locks, one call at a time: no write but to the job, no subprocess, no network, no look at other jobs.
-- What a job asks for may be hostile: no field is taken apart that is longer than Slurm accepts.
-- Whatever breaks in here, the job goes on as its user wrote it and slurmctld's log gets a line. Lua 5.1 to 5.4.

-- From job_submit.lua: how to get the modules.
local load = ...

local changes = load("gpushare_change")
local conf = load("gpushare_conf")
local consents = load("gpushare_consent")
local fields = load("gpushare_fields")
local places = load("gpushare_places")
local request = load("gpushare_request")
local since = load("gpushare_protocol").SINCE
local share = load("gpushare_share")

local M = {}

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
  slurm.log_error("%s", "gpushare: " .. message:sub(1, 300):gsub("[%c]", " ") .. more)
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

local function refuse(message, quietly)
  if not quietly then
    tell(message)
  end
  return slurm.ESLURM_ACCESS_DENIED or slurm.ERROR
end

local TOO_LONG = "a request for GPUs of more than " .. fields.LONGEST .. " characters is refused."
local RAW_SHARDS = "shards are given out by gpushare here. Ask for --gres=gpu:1 and --comment=gpushare:TOKEN instead."
local CONSTRAINT = "write the GPU's type into the constraint yourself (--gres=gpu:1 -C ...)"

-- gpu:MODEL as the user wrote it -> gpu and the model as a feature. Whether it can be understood (a constraint may be in
-- the way), and whether the job was changed.
local function rewrite_model(job_desc, asked, settings, features)
  local typed = request.without_model(asked, places.models(settings), features)
  if typed then
    fields.apply(job_desc, typed)
  end
  return typed ~= false, typed ~= nil
end

-- Tags a job that asks for one GPU, or for all of a node, where all its partitions share. The reason for which it does
-- not share, or nil.
local function take_part(job, settings, part_list, consent)
  if consent then
    job.models = places.possible_models(job.partitions, part_list, settings, job.read("features"))
    job.most_cpus = consent.cpus_auto and places.most_cpus(part_list, job.partitions) or nil
  end
  local found = share.decide(job, settings, consent)
  if found.fault then
    log("store", found.fault)
  end
  if found.wanted then
    fields.apply(job.desc, found.wanted, found.for_script)
  end
  if found.line then
    tell(found.line)
  end
  if found.cpus_line then
    tell(found.cpus_line)
  end
  return found.reason
end

-- gpushare.conf, and a line in the log where it cannot be read: then the last good settings stay in force. Without
-- any no job shares, and all else works as far as it can.
local told -- the settings whose keys out of place have been named
local function current_settings()
  local settings, why = conf.current()
  if settings and settings.moved and told ~= settings then
    told = settings
    log("moved", settings.moved .. ": no longer for gpushare.conf; gpushare.conf(5) says where they belong")
  end
  if why then
    log("conf", why .. (settings and "; the last good settings stay in force" or ""))
  end
  return settings
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
    job.read = fields.reader(job.desc, fields.DESC)
    job.asked = request.of(job.read)
  end
  return take_part(job, settings, part_list, consent)
end

local function submit(job_desc, part_list, submit_uid)
  local read = fields.reader(job_desc, fields.DESC)
  if request.is_too_long(read) then
    return refuse(TOO_LONG)
  end
  local consent, malformed = consents.parse(read("comment"))
  local answer = consent ~= nil or malformed ~= nil
  if not (answer or request.speaks_of_gpus(read)) then
    return slurm.SUCCESS -- most jobs of most sites: nothing is taken apart for them
  end
  local asked = request.of(read)
  local shards, gpus = request.asks_for_shards(asked), request.asks_for_gpus(read, asked)
  if not (answer or shards or gpus) then
    return slurm.SUCCESS
  end
  local settings = current_settings()
  local place = places.of(read("partition"), part_list, settings)
  if shards and place.ours and settings and settings.raw_shards == "deny" and not is_privileged(submit_uid) then
    return refuse(RAW_SHARDS)
  end
  local job = { desc = job_desc, read = read, asked = asked, partitions = place.list }
  local reason, must_know = rewrite(job, gpus, settings, place, part_list, consent)
  reason = malformed or reason
  if reason and (answer or must_know) then
    tell("not shared: " .. reason .. ". The job runs as written.")
  end
  return slurm.SUCCESS
end

local function modify(job_desc, job_rec, part_list, modify_uid)
  if is_privileged(modify_uid) then
    return slurm.SUCCESS
  end
  local read, is_given = fields.reader(job_desc, fields.DESC)
  if request.is_too_long(read) then
    return refuse(TOO_LONG, true)
  end
  local settings = current_settings()
  local record = fields.reader(job_rec, fields.RECORD)
  local place = places.of(read("partition") or record("partition"), part_list, settings)
  local asked = request.of(read)
  local change = { desc = job_desc, read = read, is_given = is_given, record = record, asked = asked }
  local refusal = changes.refusal(change, place, settings)
  if refusal then
    local quietly = not settings or settings.slurm_version < since.explains_refusals -- a message would be dropped
    return refuse(refusal, quietly)
  elseif place.ours and request.asks_for_gpus(read, asked) then
    rewrite_model(job_desc, asked, settings, read("features") or record("features"))
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
