-- What the hook may see of a job, and nothing else.
--
-- These tables are the whole list: every access of the hook to Slurm's job descriptor goes through `reader`
-- and `changes` below, and a test drives the hook with a descriptor that raises on any other name.
-- docs/privacy.md explains each entry. Not here, and so never read: the script, its arguments, the job's name,
-- its working directory, its input and output paths, mail addresses, and the environment but for the one
-- variable named below.

local M = {}

-- Of a job that is being submitted, or of the change that is being asked for.
M.DESC = {
  admin_comment = true, -- our tag is appended to what is there
  begin_time = true, -- a lease must not shorten a user's own --begin
  clusters = true, -- -M submissions are left alone
  comment = true, -- holds the token
  cpus_per_task = true,
  cpus_per_tres = true, -- --cpus-per-gpu
  features = true, -- gpu:v100 becomes the feature v100
  het_job_offset = true, -- heterogeneous jobs are left alone
  immediate = true,
  max_nodes = true,
  mem_per_tres = true, -- --mem-per-gpu
  min_cpus = true,
  min_mem_per_cpu = true,
  min_mem_per_node = true,
  min_nodes = true,
  ntasks_per_node = true,
  ntasks_per_tres = true, -- --ntasks-per-gpu
  num_tasks = true,
  partition = true,
  req_nodes = true, -- the user's own -w is restored with the request
  shared = true, -- --exclusive
  sockets_per_node = true,
  tres_bind = true,
  tres_freq = true,
  tres_per_job = true,
  tres_per_node = true,
  tres_per_socket = true,
  tres_per_task = true,
  user_id = true, -- a token counts only for its owner
}

-- Of a job that exists already and is being changed.
M.RECORD = { admin_comment = true, features = true, partition = true }

-- Of a partition.
M.PARTITION = { flag_default = true }

-- Of the environment: the nice value of the submitting shell. sbatch always sends it and salloc and srun send
-- no environment at all, which makes it the one harmless field by which Slurm lets a hook tell them apart.
M.BATCH_VARIABLE = "SLURM_PRIO_PROCESS"

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
  ntasks_per_tres = true,
  num_tasks = true,
  tres_bind = true,
  tres_per_job = true,
  tres_per_node = true,
  tres_per_socket = true,
  tres_per_task = true,
}

local unset

-- A function that reads one allowed field of `object`. Slurm's "unset" numbers come back as nil.
function M.reader(object, allowed)
  if not unset then
    unset = {}
    for _, name in ipairs({ "NO_VAL", "NO_VAL16", "NO_VAL64", "NO_VAL8" }) do
      if slurm[name] ~= nil then
        unset[slurm[name]] = true
      end
    end
  end
  return function(name)
    if not allowed[name] then
      error("field '" .. tostring(name) .. "' is not on the allow-list")
    end
    local value = object[name]
    if value == nil or value == "" or unset[value] then
      return nil
    end
    return value
  end
end

-- Whether the job came from sbatch. Where that cannot be told (sbatch --export-file, REST), the answer is no.
function M.is_batch(job_desc)
  local environment = job_desc.environment
  return environment ~= nil and environment[M.BATCH_VARIABLE] ~= nil
end

-- Writes all of `wanted` (field -> value), or none of it.
function M.apply(job_desc, wanted)
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
