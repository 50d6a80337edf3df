-- How a job on one GPU, or on all GPUs of a node (a gang), is written so that it can share: as one request for the node,
-- or for each card, with the CPUs and the memory that belong to its GPUs. Both are `asks`: {gpus, tasks, cpus = a task's,
-- if it says so, ...}. docs/hook.md says why a gang has a task for each card. Pure functions.

local load = ...
local request = load("gpushare_request")

local M = {}

-- Ends what is being decided: the job cannot share, for a reason that its user is told. `M.attempt` catches it.
function M.cannot(reason)
  error({ reason = reason }, 0)
end

-- What step(...) returns; nil and the reason where it finds that the job cannot share. Faults go on as they are.
function M.attempt(step, ...)
  local ok, found, more = pcall(step, ...)
  if not ok and type(found) ~= "table" then
    error(found, 0)
  elseif not ok then
    return nil, found.reason
  end
  return found, more
end

-- What the job asks for, one item a field: {field = item}.
local function one_a_field(asked)
  local found = {}
  for _, field in ipairs(request.FIELDS) do
    local items = field == "tres_per_task" and request.without_cpus(asked[field]) or asked[field]
    if #items > 1 then
      M.cannot("it asks for several kinds of resources")
    end
    found[field] = items[1]
  end
  return found
end

-- The GPU that all these items ask for: {type, prefix}, each or none of it.
local function one_gpu(found)
  local gpu = {}
  for _, field in ipairs(request.FIELDS) do
    local item = found[field]
    if item and (item.name ~= "gpu" or item.odd) then
      M.cannot("it asks for more than a GPU")
    elseif item and item.count ~= 1 then
      M.cannot(item.count == 0 and "it asks for no GPU" or "it asks for more than one GPU")
    elseif item and gpu.type and item.type and item.type ~= gpu.type then
      M.cannot("it asks for two types of GPU")
    elseif item then
      gpu.type = gpu.type or item.type
      gpu.prefix = item.prefix ~= "" and item.prefix or gpu.prefix
    end
  end
  return gpu
end

-- Whatever may be several GPUs, or a GPU on several nodes, is no job on one.
local function must_be_one(read, found, tasks, max_nodes)
  local one_in_all = found.tres_per_job ~= nil or next(found) == nil
  if (read("min_nodes") or 1) > 1 then
    M.cannot("it asks for more than one node")
  elseif (read("features") or ""):find("*", 1, true) then
    M.cannot("its constraint asks for a number of nodes")
  elseif found.tres_per_task and tasks ~= 1 then
    M.cannot("it asks for a GPU for each of several tasks")
  elseif max_nodes and max_nodes > 1 and not one_in_all then
    M.cannot("it may run on more than one node (add -N 1)")
  elseif not max_nodes and not one_in_all and tasks ~= 1 then
    M.cannot("its tasks may be spread over nodes (add -N 1)")
  elseif found.tres_per_socket and read("sockets_per_node") ~= 1 then
    M.cannot("it asks for a GPU for each socket")
  end
end

local function must_name_one_node(read)
  if not (read("req_nodes") or ""):match("^[%w._-]*$") then
    M.cannot("its node list (-w) names more than one node")
  end
end

-- The job's request if it is for exactly one GPU on one node: {gpus = 1, tasks, cpus, type, prefix, pin_node, per_gpu,
-- per_task}.
function M.single(read, asked)
  local found = one_a_field(asked)
  local gpu = one_gpu(found)
  must_name_one_node(read)
  local tasks, per_gpu = request.tasks(read), read("ntasks_per_tres") or 0
  if next(found) == nil and per_gpu == 0 then
    M.cannot("it asks for no GPU")
  elseif next(found) == nil and read("num_tasks") ~= per_gpu then
    M.cannot("--ntasks-per-gpu and the number of tasks do not make one GPU")
  elseif per_gpu > 0 then
    tasks = per_gpu
  end
  local max_nodes = read("max_nodes")
  max_nodes = max_nodes ~= 0 and max_nodes or nil
  must_be_one(read, found, tasks, max_nodes)
  return {
    gpus = 1,
    tasks = tasks,
    cpus = read("cpus_per_task"),
    type = gpu.type,
    prefix = gpu.prefix,
    pin_node = max_nodes ~= 1 and (max_nodes ~= nil or tasks > 1),
    per_gpu = per_gpu > 0,
    per_task = found.tres_per_task ~= nil,
  }
end

-- How Slurm writes "as many as you like" in 16 bits: --hint=multithread says so of tasks a core.
local NO_LIMIT = 65535

-- Whether one of the task options that were read is in the way of another number of tasks.
local function binds_tasks(read)
  for _, name in ipairs({ "ntasks_per_tres", "ntasks_per_socket", "ntasks_per_core" }) do
    local value = read(name) or 0
    if value > 0 and value ~= NO_LIMIT then
      return true
    end
  end
  return read("tres_bind") ~= nil or read("tres_freq") ~= nil
end

-- The job's request if it is for all `gpus` GPUs of one node: {gpus, tasks, cpus, said_tasks = whether it says how many}.
-- nil if it is for another number of them.
function M.gang(read, asked, gpus)
  local found = one_a_field(asked)
  local where, item = next(found)
  if not item or next(found, where) then
    M.cannot(item and "it asks for several kinds of resources" or "it asks for no GPU")
  elseif item.name ~= "gpu" or item.odd or item.type then
    M.cannot("it asks for more than plain GPUs")
  elseif where == "tres_per_task" or where == "tres_per_socket" then
    M.cannot("it binds GPUs to tasks or sockets")
  elseif gpus < 2 or item.count ~= gpus then
    return nil
  end
  local max_nodes, tasks, said_tasks = read("max_nodes"), request.tasks(read)
  if (read("min_nodes") or 1) > 1 then
    M.cannot("it asks for more than one node")
  elseif max_nodes ~= 1 and (tasks ~= 1 or (max_nodes and max_nodes > 1 and where ~= "tres_per_job")) then
    M.cannot("it may run on more than one node (add -N 1)")
  end
  must_name_one_node(read)
  if binds_tasks(read) then
    M.cannot("it binds tasks or sets the clock of its GPUs")
  end
  return { gpus = gpus, tasks = tasks, cpus = read("cpus_per_task"), said_tasks = said_tasks }
end

-- Takes off a binding that says nothing with one task on one GPU: --gpus-per-task=1 implies it.
local function unbind(read, asks, wanted)
  local bind = read("tres_bind")
  if read("tres_freq") then
    M.cannot("--gpu-freq works on whole GPUs only")
  elseif bind and not (asks.per_task and bind:match("^gres[:/]gpu:per_task:1$")) then
    M.cannot("--gpu-bind works on whole GPUs only")
  end
  wanted.tres_bind = bind and ""
end

-- The number in "gres/gpu:8", of an option for each GPU; nil if it is not given.
local function for_each_gpu(read, field, option)
  local number = tonumber((read(field) or ""):match("^%a*[:/]?gpu[:=](%d+)$"))
  if read(field) and not (number and number >= 1 and number < 1e9) then
    M.cannot("its " .. option .. " is not understood")
  end
  return number
end

-- The GPUs' CPUs as those of the tasks: a gang's are split evenly over the cards and rounded up.
local function plain_cpus(read, asks, wanted, default_cpus)
  local given = for_each_gpu(read, "cpus_per_tres", "--cpus-per-gpu")
  local cpus = given or (not asks.cpus and default_cpus) or nil
  if asks.gpus > 1 then
    local at_least = math.ceil(asks.tasks * (asks.cpus or 1) / asks.gpus)
    wanted.cpus_per_task = given or math.max(cpus or 1, at_least)
    wanted.min_cpus = wanted.cpus_per_task * asks.gpus
  elseif cpus then
    local per_task = math.max(1, cpus / asks.tasks)
    if per_task % 1 ~= 0 then
      M.cannot(string.format("%d CPUs a GPU cannot be split evenly over %d tasks", cpus, asks.tasks))
    end
    wanted.cpus_per_task = per_task
    wanted.min_cpus = math.max(read("min_cpus") or 1, per_task * asks.tasks)
  end
  wanted.cpus_per_tres = given and ""
end

-- The GPUs' memory as the node's.
local function plain_memory(read, asks, wanted, default_mem_mib)
  local given, by_cpu = for_each_gpu(read, "mem_per_tres", "--mem-per-gpu"), read("min_mem_per_cpu")
  if given then
    wanted.mem_per_tres, wanted.min_mem_per_node = "", given * asks.gpus
  elseif by_cpu and asks.gpus > 1 then
    wanted.min_mem_per_node = by_cpu * asks.tasks * (asks.cpus or 1) -- by card it would be another amount
  elseif default_mem_mib and not by_cpu and not read("min_mem_per_node") then
    wanted.min_mem_per_node = default_mem_mib * asks.gpus
  end
end

-- What belongs to the GPUs, as plain CPU and memory requests: shards know no --mem-per-gpu and the like, and Slurm
-- refuses them together. `default_cpus` and `default_mem_mib` are the partition's DefCpuPerGPU and DefMemPerGPU.
-- The changes as {field = value}.
function M.carry_along(read, asks, default_cpus, default_mem_mib)
  local wanted = {}
  if asks.gpus == 1 then
    unbind(read, asks, wanted)
  end
  plain_cpus(read, asks, wanted, default_cpus)
  plain_memory(read, asks, wanted, default_mem_mib)
  if asks.per_gpu then
    wanted.ntasks_per_tres = slurm.NO_VAL16
    wanted.num_tasks = asks.tasks
  end
  return wanted
end

-- `what` ("gpu:1", "shard:v100_0:2") as the job's only request, per node, or per card of a gang, added to `wanted`.
function M.ask_for(read, asks, wanted, prefix, what)
  for _, field in ipairs(request.FIELDS) do
    if read(field) then
      wanted[field] = field == "tres_per_task" and select(2, request.without_cpus(request.parse(read(field)))) or ""
    end
  end
  if asks.gpus > 1 then
    wanted.tres_per_task = prefix .. what
    wanted.num_tasks = asks.gpus
    wanted.ntasks_per_node = read("ntasks_per_node") and asks.gpus
  else
    wanted.tres_per_node = prefix .. what
  end
  if asks.gpus > 1 or asks.pin_node then
    wanted.min_nodes, wanted.max_nodes = 1, 1
  end
end

-- What the task prolog must know to show a gang's script its own request: GPUs, tasks, CPUs a task. 0: it did not say, and
-- Slurm would not either; frameworks take SLURM_NTASKS for a sign that srun has started them. CPUs are rounded up: while a
-- step leaves too few for the next, Slurm (24.11) refuses that one instead of letting it wait. Of a job on one GPU: what
-- each of its processes may take of its memory under MPS.
function M.for_script(asks, memory_mib)
  if asks.gpus == 1 then
    return { GPUSHARE_MEMORY = memory_mib and string.format("%d", memory_mib) }
  end
  local held = math.ceil(asks.tasks * (asks.cpus or 0) / asks.gpus) * asks.gpus
  local tasks, cpus = asks.said_tasks and asks.tasks or 0, math.floor(held / asks.tasks)
  return { GPUSHARE_GANG = string.format("%d:%d:%d", asks.gpus, tasks, cpus) }
end

-- Whether the job says how much memory it needs. Else Slurm's default counts, which may be so much a CPU.
local function names_memory(read, wanted)
  return wanted.min_mem_per_node or read("min_mem_per_node") or read("min_mem_per_cpu")
end

-- `cpus` in all, as a workload's curve says, in place of the CPUs in `wanted` (made by `carry_along` and `ask_for`) and
-- in the job on one GPU. Memory stays what it was. The CPUs that it asks for now, and those before; false and the CPUs
-- before where fewer might mean less memory than the job needs.
function M.with_cpus(read, asks, wanted, cpus)
  local before = wanted.cpus_per_task or asks.cpus or 1
  local per_task = math.max(1, math.ceil(cpus / asks.tasks))
  if per_task < before and not names_memory(read, wanted) then
    return false, before * asks.tasks
  elseif per_task ~= before then
    if read("min_mem_per_cpu") and not wanted.min_mem_per_node then
      wanted.min_mem_per_node = read("min_mem_per_cpu") * before * asks.tasks
    end
    wanted.cpus_per_task = per_task
    wanted.min_cpus = per_task * asks.tasks
    if (read("pn_min_cpus") or 0) <= before then -- else it is the user's own --mincpus
      wanted.pn_min_cpus = per_task
    end
    if wanted.tres_per_task and wanted.tres_per_task ~= "" then
      wanted.tres_per_task = string.format("cpu%s%d", wanted.tres_per_task:match("[:=]") or "=", per_task)
    end
  end
  return per_task * asks.tasks, before * asks.tasks
end

return M
