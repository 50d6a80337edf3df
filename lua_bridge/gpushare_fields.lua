-- What the hook may see of a job, and nothing else.
--
-- These tables are the whole list: the hook reads a job through `reader` and writes it through `apply`, and both refuse
-- any other field. The one exception is `is_batch`, which reads one variable of the environment, named below.
-- A test drives the hook with a job descriptor that raises on any other name. docs/privacy.md explains each entry.
-- Not here, and so never read: the script, its arguments, the job's name, its working directory, its input and output
-- paths, mail addresses.

local load = ...

local M = {}

-- Slurm checks lengths after the hook has run. No text field of a job that it accepts is longer than this (but for
-- the node list, and a job with a longer one than this does not share).
M.LONGEST = load("gpushare_protocol").LONGEST

-- What a field holds. Slurm's mark for "unset" depends on the field's width: 65534 is unset in 16 bits and an
-- ordinary number in 32.
local TEXT, NUMBER, BITS16, BITS32, BITS64 = "text", "number", "NO_VAL16", "NO_VAL", "NO_VAL64"

-- Of a job that is being submitted, or of the change that is being asked for.
M.DESC = {
  admin_comment = TEXT, -- our tag is appended to what is there
  begin_time = NUMBER, -- a lease must not shorten a user's own --begin
  clusters = TEXT, -- -M submissions are left alone
  comment = TEXT, -- holds the token
  cpus_per_task = BITS16,
  cpus_per_tres = TEXT, -- --cpus-per-gpu
  features = TEXT, -- gpu:v100 becomes the feature v100
  het_job_offset = BITS32, -- heterogeneous jobs are left alone
  immediate = NUMBER,
  max_nodes = BITS32,
  mem_per_tres = TEXT, -- --mem-per-gpu
  min_cpus = BITS32,
  min_mem_per_cpu = BITS64,
  min_mem_per_node = BITS64,
  min_nodes = BITS32,
  nice = BITS32, -- whether who opts out writes a nice value as well
  ntasks_per_core = BITS16, -- a gang that binds its tasks is left alone
  ntasks_per_node = BITS16,
  ntasks_per_socket = BITS16,
  ntasks_per_tres = BITS16, -- --ntasks-per-gpu
  num_tasks = BITS32,
  partition = TEXT,
  pn_min_cpus = BITS16, -- sbatch repeats -c there
  requeue = BITS16, -- --requeue is the owner's consent to being requeued
  req_nodes = TEXT, -- the user's own -w is restored with the request
  shared = BITS16, -- --exclusive
  sockets_per_node = BITS16,
  time_limit = BITS32, -- a job that was given a card must not become longer before it starts
  tres_bind = TEXT,
  tres_freq = TEXT,
  tres_per_job = TEXT,
  tres_per_node = TEXT,
  tres_per_socket = TEXT,
  tres_per_task = TEXT,
  user_id = NUMBER, -- a token counts only for its owner
}

-- Of a job that exists already and is being changed. Its request counts when it moves to another partition.
M.RECORD = {
  admin_comment = TEXT,
  features = TEXT,
  partition = TEXT,
  time_limit = BITS32,
  tres_per_job = TEXT,
  tres_per_node = TEXT,
  tres_per_socket = TEXT,
  tres_per_task = TEXT,
}

-- Of a partition. Whether it has nodes that share decides, not its name. The rest is how many CPUs a job may have there.
M.PARTITION = { flag_default = NUMBER, max_cpus_per_node = BITS32, nodes = TEXT, total_cpus = NUMBER, total_nodes = NUMBER }

-- Of the environment: the nice value of the submitting shell. sbatch always sends it and salloc and srun send
-- no environment at all, which makes it the one harmless field by which Slurm lets a hook tell them apart.
M.BATCH_VARIABLE = "SLURM_PRIO_PROCESS"

-- The one variable that the hook writes: the number of tasks and CPUs that a gang's owner asked for.
M.GANG_VARIABLE = "GPUSHARE_GANG"

-- What the hook may write.
M.WRITABLE = {
  admin_comment = true,
  begin_time = true,
  cpus_per_task = true,
  cpus_per_tres = true,
  features = true,
  max_nodes = true,
  mem_per_tres = true,
  min_cpus = true,
  min_mem_per_node = true,
  min_nodes = true,
  nice = true, -- only to put the user's own back
  ntasks_per_node = true,
  ntasks_per_tres = true,
  num_tasks = true,
  pn_min_cpus = true,
  req_nodes = true, -- only to put the user's own back
  tres_bind = true,
  tres_per_job = true,
  tres_per_node = true,
  tres_per_socket = true,
  tres_per_task = true,
}

-- What `reader` keeps of a field that is absent, and of one that is there and says nothing.
local ABSENT, EMPTY = {}, {}

local function fetch(object, allowed, name)
  local kind = allowed[name]
  if not kind then
    error("field '" .. tostring(name) .. "' is not on the allow-list")
  end
  local value = object[name]
  if value == nil then
    return ABSENT
  end
  -- A 16-bit field may be wider in a later release; no 16-bit number is as large as NO_VAL.
  if value == "" or value == slurm[kind] or (kind == BITS16 and value == slurm.NO_VAL) then
    return EMPTY
  end
  return value
end

local function known(value)
  if value ~= ABSENT and value ~= EMPTY then
    return value
  end
  return nil
end

-- One allowed field of `object`; nil where it is unset or empty. For a look at one field of many partitions: a reader
-- of each would be made for nothing.
function M.value(object, allowed, name)
  return known(fetch(object, allowed, name))
end

-- Two functions on `object`: the value of an allowed field (nil where it is unset or empty), and whether a change
-- names the field at all, if only to empty it. Each field is fetched once: Slurm looks a name up in a long list and
-- copies a text on every access.
function M.reader(object, allowed)
  local values = {}
  local function read(name)
    local value = values[name]
    if value == nil then
      value = fetch(object, allowed, name)
      values[name] = value
    end
    return known(value)
  end
  local function is_given(name)
    read(name)
    return values[name] ~= ABSENT
  end
  return read, is_given
end

local TEXTS = {}
for name, kind in pairs(M.DESC) do
  if kind == TEXT then
    TEXTS[#TEXTS + 1] = name
  end
end

-- Whether one of the job's text fields is longer than any that Slurm accepts.
function M.has_long_text(read)
  for _, name in ipairs(TEXTS) do
    local text = read(name)
    if text and #text > M.LONGEST then
      return true
    end
  end
  return false
end

-- Whether the job came from sbatch. Where that cannot be told (sbatch --export-file, REST), the answer is no.
function M.is_batch(job_desc)
  local environment = job_desc.environment
  return environment ~= nil and environment[M.BATCH_VARIABLE] ~= nil
end

-- Writes all of `wanted` (field -> value), or none of it, and `for_script` for the task prolog.
function M.apply(job_desc, wanted, for_script)
  if for_script then
    job_desc.environment[M.GANG_VARIABLE] = for_script -- it says nothing to a job that is not a gang
  end
  local before, written = {}, {}
  for name in pairs(wanted) do
    if not M.WRITABLE[name] then
      error("field '" .. tostring(name) .. "' may not be written")
    end
    before[name] = job_desc[name]
  end
  local ok, why = pcall(function()
    for name, value in pairs(wanted) do
      written[#written + 1] = name
      job_desc[name] = value
    end
  end)
  if not ok then
    for _, name in ipairs(written) do
      -- Slurm clears a string by the empty one; nil is refused.
      pcall(function()
        job_desc[name] = before[name] == nil and "" or before[name]
      end)
    end
    error(why, 0)
  end
end

return M
