-- Which changes of a waiting job its user may make. What the helper decides for a shared job stays, and nobody gets
-- shards by a change.

local load = ...
local consents = load("gpushare_consent")
local fields = load("gpushare_fields")
local request = load("gpushare_request")
local since = load("gpushare_protocol").SINCE
local share = load("gpushare_share")
local tags = load("gpushare_tag")

local M = {}

M.NICE_OFFSET = 2147483648 -- how Slurm keeps a nice value of 0

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
  elseif consent and consent.token == tags.field(tag, "token") and consent.max == tonumber(tags.field(tag, "max_isd_pct")) then
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
  local can_change = settings.slurm_version >= since.gpu_becomes_shard and not share.is_stale(settings)
  if not can_change or tags.field(tag, "original") ~= "gpu:1" then
    return false
  end
  local prefix = share.prefix(settings)
  local wanted = { tres_per_node = prefix .. "gpu:0", tres_per_job = prefix .. "gpu:1" }
  if tags.field(tag, "placed") and tags.field(tag, "nodes") then
    wanted.req_nodes = tags.field(tag, "nodes")
  end
  if tags.field(tag, "lease") then
    wanted.begin_time = os.time()
  end
  local nice = tonumber(tags.field(tag, "nice"))
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

-- Why a user may not change a shared job so; nil if that may be. A job whose owner opts out is written as it leaves.
local function refusal_if_shared(change, tag, place, settings)
  local read = change.read
  local comment = new_comment(read, change.is_given, tag)
  if moves_shared_job(read, change.is_given, comment) then
    return "a shared job's GPU cannot be changed by hand. Submit it again without the token."
  elseif read("partition") and not place.all_shared then
    -- Its nodes may be the same, but nobody would measure it there.
    return "a shared job stays in partitions that share GPUs. Submit it again without the token."
  elseif tags.field(tag, "placed") and outgrows_place(read, change.record) then
    return "this job has been given a GPU and is about to start: it cannot become larger now."
  elseif tags.field(tag, "gang") and changes_any(read, TASKS) then
    return "the tasks of a job that shares all GPUs of a node cannot be changed. Submit it again."
  elseif read("pn_min_cpus") then
    return "--mincpus of a shared job cannot be changed. Submit it again without the token."
  elseif comment == "new" then
    return "the token and max= of a submitted job stay. Take the comment off to opt out."
  elseif comment == "out" and tags.field(tag, "original") and not (settings and leave_sharing(change.desc, tag, settings)) then
    return "this job cannot be taken out of sharing any more. Cancel it and submit it again."
  end
  return nil
end

-- Why a user may not change a job so; nil if that may be. `change` has the descriptor `desc`, `read` and `is_given` of it,
-- the `record` of the job as it is, and what is `asked` for. `settings` are nil where there are none.
function M.refusal(change, place, settings)
  local read, record, asked = change.read, change.record, change.asked
  local tag = tags.find(record("admin_comment"))
  local denied = place.ours and settings and settings.raw_shards == "deny"
  if read("admin_comment") then
    return "only administrators write AdminComment."
  elseif tag and tags.field(tag, "cluster") then
    return refusal_if_shared(change, tag, place, settings)
  elseif denied and (request.asks_for_shards(asked) or brings_shards(read, record, settings)) then
    return "shards are given out by gpushare here."
  elseif place.ours and request.is_unclear(asked) then
    return "this change of GPUs is not understood. Write it as gres/gpu:1 or gres/gpu:TYPE:1."
  end
  return nil
end

return M
