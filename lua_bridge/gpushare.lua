-- slurm-gpushare in slurmctld: turns `sbatch --comment=gpushare:TOKEN` into a tagged, shareable job.
--
-- job_submit.lua loads this and calls `job_submit` and `job_modify`. Both run under
-- slurmctld's locks, one call at a time: no write but to the job, no subprocess, no network, no look at other jobs.
-- What a job asks for may be hostile: no field is taken apart that is longer than Slurm accepts.
-- Whatever breaks in here, the job goes on as its user wrote it and slurmctld's log gets a line. Lua 5.1 to 5.4.

-- From job_submit.lua: how to get the modules, and what `gpushare configure` knew of the site.
local load, site = ...

local conf = load("gpushare_conf")
local consents = load("gpushare_consent")
local fields = load("gpushare_fields")
local nodes = load("gpushare_nodes")
local request = load("gpushare_request")
local share = load("gpushare_share")

local M = {}

M.MODIFY_MESSAGE = 230200 -- from here on a refused change may say why
M.LOG_SECONDS = 60
M.NICE_OFFSET = 2147483648 -- how Slurm keeps a nice value of 0

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

-- The names in a job's partition field, the default one if it has none.
local function partition_names(text, part_list)
  local list = {}
  for name in (text or ""):gmatch("[^,]+") do
    list[#list + 1] = name
  end
  if #list == 0 then
    for name, partition in pairs(part_list or {}) do
      if fields.value(partition, fields.PARTITION, "flag_default") == 1 then
        list[1] = name
      end
    end
  end
  return list
end

-- The nodes of a partition as Slurm writes them; "" if this user has no such partition.
local function nodes_of(part_list, name)
  local partition = (part_list or {})[name]
  return partition and fields.value(partition, fields.PARTITION, "nodes") or ""
end

-- All nodes with GPUs that may be shared: those that `configure` knew, and those of the partitions in gpushare.conf.
local function sharing_nodes(part_list, shared)
  local lists = {}
  for _, names in pairs(site.models) do
    lists[#lists + 1] = names
  end
  for name in pairs(shared) do
    lists[#lists + 1] = nodes_of(part_list, name)
  end
  table.sort(lists) -- the same text every time: it is the key of what is remembered of it
  return table.concat(lists, ",")
end

-- Where the job may run: {list = its partitions, all_shared, ours = whether one of them has nodes that share}.
local function places(text, part_list, settings)
  if text and #text > fields.LONGEST then
    return { list = {}, all_shared = false, ours = true }
  end
  local shared = settings and settings.partitions or {}
  local list = partition_names(text, part_list)
  local all_shared, ours = #list > 0, false
  for _, name in ipairs(list) do
    all_shared = all_shared and shared[name] or false
    ours = ours or shared[name] or false
  end
  if not ours then
    local sharing = sharing_nodes(part_list, shared)
    for _, name in ipairs(list) do
      ours = ours or nodes.overlap(sharing, nodes_of(part_list, name))
    end
  end
  return { list = list, all_shared = all_shared, ours = ours }
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

-- The models whose GPUs have one type an index, so that gpu:MODEL is a name of ours.
local function models(settings)
  local found = {}
  for model in pairs(site.models) do
    found[model] = true
  end
  for model in pairs(settings and settings.gpu_models or {}) do
    found[model] = true
  end
  return found
end

-- The models that the job may get: those of its partitions' nodes, and of these the one that it names itself.
local function possible_models(place, part_list, settings, features)
  local named = request.named_model(features, settings.gpu_models)
  local found = {}
  for model in pairs(settings.gpu_models) do
    local list = site.models[model] -- nil: `configure` did not know it yet
    for _, name in ipairs((not named or named == model) and place.list or {}) do
      found[model] = found[model] or list == nil or nodes.overlap(list, nodes_of(part_list, name)) or nil
    end
  end
  return found
end

-- gpu:MODEL as the user wrote it -> gpu and the model as a feature. Whether it can be understood (a constraint may be in
-- the way), and whether the job was changed.
local function rewrite_model(job_desc, asked, settings, features)
  local typed = request.without_model(asked, models(settings), features)
  if typed then
    fields.apply(job_desc, typed)
  end
  return typed ~= false, typed ~= nil
end

-- How many CPUs of a node a job may have in all of these partitions: MaxCPUsPerNode, and what a node has on average.
local function most_cpus(part_list, list)
  local most = math.huge
  for _, name in ipairs(list) do
    local read = fields.reader((part_list or {})[name] or {}, fields.PARTITION)
    local cpus, nodes_there = read("total_cpus") or 0, read("total_nodes") or 0
    if cpus > 0 and nodes_there > 0 then
      most = math.min(most, math.floor(cpus / nodes_there))
    end
    most = math.min(most, read("max_cpus_per_node") or most)
  end
  return math.max(1, most)
end

-- Tags a job that asks for one GPU, or for all of a node, where all its partitions share. The reason for which it does
-- not share, or nil.
local function take_part(job_desc, read, asked, settings, place, part_list, consent)
  local models_of_job = consent and possible_models(place, part_list, settings, read("features")) or {}
  local most = consent and consent.cpus_auto and most_cpus(part_list, place.list) or nil
  local found = share.decide(job_desc, read, asked, settings, place.list, models_of_job, consent, most)
  if found.fault then
    log("store", found.fault)
  end
  if found.wanted then
    fields.apply(job_desc, found.wanted, found.for_script)
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
local function current_settings()
  local settings, why = conf.current()
  if why then
    log("conf", why .. (settings and "; the last good settings stay in force" or ""))
  end
  return settings
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
  local place = places(read("partition"), part_list, settings)
  if shards and place.ours and settings and settings.raw_shards == "deny" and not is_privileged(submit_uid) then
    return refuse(RAW_SHARDS)
  end
  local reason
  local understood, rewritten = true, false
  if gpus and place.ours then
    understood, rewritten = rewrite_model(job_desc, asked, settings, read("features"))
  end
  if not understood then
    reason, answer = CONSTRAINT, true
  elseif not settings then
    reason = "sharing is not available now"
  elseif not place.all_shared then
    reason = "its partitions do not all share GPUs"
  elseif gpus then
    if rewritten then
      read = fields.reader(job_desc, fields.DESC)
      asked = request.of(read)
    end
    reason = take_part(job_desc, read, asked, settings, place, part_list, consent)
  else
    reason = "it asks for no GPU"
  end
  reason = malformed or reason
  if answer and reason then
    tell("not shared: " .. reason .. ". The job runs as written.")
  end
  return slurm.SUCCESS
end

-- Whether a change touches what the helper decides for a shared job: the GPU and the node.
local function moves_shared_job(read, is_given, comment)
  for _, field in ipairs(request.FIELDS) do
    if is_given(field) then
      return true
    end
  end
  -- Who opts out may take the helper's node off as well: a hook cannot, Slurm takes its empty text for unchanged.
  local nodes = is_given("req_nodes") and not (comment == "out" and not read("req_nodes"))
  return nodes or math.max(read("min_nodes") or 1, read("max_nodes") or 1) > 1
end

-- A field of a tag: "c=2;t=gs-...;l=1".
local function tag_field(tag, name)
  return (";" .. tag):match(";" .. name .. "=([^;]*)")
end

local TASKS = { "num_tasks", "cpus_per_task", "ntasks_per_node", "ntasks_per_tres" }
local SIZES = { "min_cpus", "min_mem_per_node", "min_mem_per_cpu" }

local function changes_any(read, list)
  for _, field in ipairs(list) do
    if read(field) then
      return true
    end
  end
  return false
end

-- Whether a job that the helper has just given a place would no longer be what it was given it for: it goes ahead of
-- everybody, because it is short and fits. In a moment it runs, or waits again as it was.
local function outgrows_place(read, record)
  local limit = read("time_limit")
  return changes_any(read, TASKS)
    or changes_any(read, SIZES)
    or (limit ~= nil and limit > (record("time_limit") or 0))
end

-- What a change of the comment means for a job that may share: "out" if its owner opts out, "new" if it says anything
-- that a tagged job cannot follow, else nil.
local function new_comment(read, is_given, tag)
  if not is_given("comment") then
    return nil
  end
  local consent, malformed = consents.parse(read("comment"))
  if not consent and not malformed then
    return "out"
  elseif consent and consent.token == tag_field(tag, "t") and consent.max == tonumber(tag_field(tag, "m")) then
    return nil
  end
  return "new"
end

-- Writes what a job becomes whose owner opts out: the whole GPU that it asked for, and no lease. As a request for the
-- whole job instead of for each node it is none that the helper places. The old request is set to 0, since Slurm takes
-- an empty one for unchanged. The nice value becomes the user's own again: ours would start the job before everybody. A
-- user's change may not make it negative; what an administrator gave, the helper puts back. False where this Slurm
-- cannot change the request so.
local function leave_sharing(job_desc, tag, settings)
  local version = settings.slurm_version or math.huge
  if version < share.RETARGET or tag_field(tag, "o") ~= "gpu:1" then
    return false
  end
  local prefix = version < share.SLASH_PREFIX and "gres:" or "gres/"
  local wanted = { tres_per_node = prefix .. "gpu:0", tres_per_job = prefix .. "gpu:1" }
  if tag_field(tag, "g") and tag_field(tag, "w") then
    wanted.req_nodes = tag_field(tag, "w")
  end
  if tag_field(tag, "l") then
    wanted.begin_time = os.time()
  end
  local nice = tonumber(tag_field(tag, "n"))
  if nice and not fields.reader(job_desc, fields.DESC)("nice") then
    wanted.nice = M.NICE_OFFSET + math.max(0, nice)
  end
  fields.apply(job_desc, wanted)
  return true
end

-- Whether the change takes a job with part of a card, which no hook has seen, to nodes that share.
local function brings_shards(read, record, settings)
  return read("partition") ~= nil and request.has_part_of_a_card(request.of(record), settings.shards_per_gpu)
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
  local tag = (" " .. (record("admin_comment") or "")):match("%sGS1:(%S*)")
  local place = places(read("partition") or record("partition"), part_list, settings)
  local asked = request.of(read)
  local shards, gpus = request.asks_for_shards(asked), request.asks_for_gpus(read, asked)
  local denied = place.ours and settings and settings.raw_shards == "deny"
  -- Before 23.02 Slurm drops a message with an error; without a version nothing is said to be safe.
  local quietly = not settings or (settings.slurm_version and settings.slurm_version < M.MODIFY_MESSAGE)
  if read("admin_comment") then
    return refuse("only administrators write AdminComment.", quietly)
  elseif tag and tag:match("^c=") then
    local comment = new_comment(read, is_given, tag)
    if moves_shared_job(read, is_given, comment) then
      return refuse("a shared job's GPU cannot be changed by hand. Submit it again without the token.", quietly)
    elseif read("partition") and not place.all_shared then
      -- Its nodes may be the same, but nobody would measure it there.
      return refuse("a shared job stays in partitions that share GPUs. Submit it again without the token.", quietly)
    elseif tag_field(tag, "g") and outgrows_place(read, record) then
      return refuse("this job has been given a GPU and is about to start: it cannot become larger now.", quietly)
    elseif tag_field(tag, "k") and changes_any(read, TASKS) then
      return refuse("the tasks of a job that shares all GPUs of a node cannot be changed. Submit it again.", quietly)
    elseif read("pn_min_cpus") then
      return refuse("--mincpus of a shared job cannot be changed. Submit it again without the token.", quietly)
    elseif comment == "new" then
      return refuse("the token and max= of a submitted job stay. Take the comment off to opt out.", quietly)
    elseif comment == "out" and not (settings and leave_sharing(job_desc, tag, settings)) then
      return refuse("this job cannot be taken out of sharing any more. Cancel it and submit it again.", quietly)
    end
  elseif denied and (shards or brings_shards(read, record, settings)) then
    return refuse("shards are given out by gpushare here.", quietly)
  elseif place.ours and request.is_unclear(asked) then
    return refuse("this change of GPUs is not understood. Write it as gres/gpu:1 or gres/gpu:TYPE:1.", quietly)
  elseif gpus and place.ours then
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
