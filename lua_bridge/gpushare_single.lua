-- A job that asks for one GPU: whether it does, and how that is written as one request per node, with all that belongs to
-- the GPU. Pure functions: strings and numbers in, tables out.

local load = ...
local request = load("gpushare_request")

local M = {}

-- What the job asks for, one item a field: {field = item}. nil and the reason if a field has more.
local function one_a_field(asked)
  local found = {}
  for _, field in ipairs(request.FIELDS) do
    local items = request.without_cpus(field, asked[field])
    if #items > 1 then
      return nil, "it asks for several kinds of resources"
    end
    found[field] = items[1]
  end
  return found
end

-- Why an item is not a request for one GPU of this type, which is nil while none has been named; nil if it is.
local function not_one_gpu(item, gpu_type)
  if item.name ~= "gpu" or item.odd then
    return "it asks for more than a GPU"
  elseif item.count ~= 1 then
    return item.count == 0 and "it asks for no GPU" or "it asks for more than one GPU"
  elseif gpu_type and item.type and item.type ~= gpu_type then
    return "it asks for two types of GPU"
  end
  return nil
end

-- The GPU that all these items ask for: {type, prefix}, each or none of it. nil and the reason if it is not one.
local function one_gpu(found)
  local gpu = {}
  for _, field in ipairs(request.FIELDS) do
    local item = found[field]
    local reason = item and not_one_gpu(item, gpu.type)
    if reason then
      return nil, reason
    elseif item then
      gpu.type = gpu.type or item.type
      gpu.prefix = item.prefix ~= "" and item.prefix or gpu.prefix
    end
  end
  return gpu
end

-- How many tasks the job has, and whether it says so by --ntasks-per-gpu. nil and the reason if it asks for no GPU.
local function tasks_of(read, found)
  local per_gpu = read("ntasks_per_tres") or 0
  if per_gpu > 0 then
    if next(found) == nil and read("num_tasks") ~= per_gpu then
      return nil, "--ntasks-per-gpu and the number of tasks do not make one GPU"
    end
    return per_gpu, true
  elseif next(found) == nil then
    return nil, "it asks for no GPU"
  end
  return (request.tasks(read)), false
end

-- The reason for which it may be several GPUs, or a GPU on several nodes; nil if it is neither.
local function may_be_several(read, found, tasks, max_nodes)
  local one_in_all = found.tres_per_job ~= nil or next(found) == nil
  if (read("min_nodes") or 1) > 1 then
    return "it asks for more than one node"
  elseif (read("features") or ""):find("*", 1, true) then
    return "its constraint asks for a number of nodes"
  elseif found.tres_per_task and tasks ~= 1 then
    return "it asks for a GPU for each of several tasks"
  elseif max_nodes and max_nodes > 1 and not one_in_all then
    return "it may run on more than one node (add -N 1)"
  elseif not max_nodes and not one_in_all and tasks ~= 1 then
    return "its tasks may be spread over nodes (add -N 1)"
  elseif found.tres_per_socket and read("sockets_per_node") ~= 1 then
    return "it asks for a GPU for each socket"
  end
  return nil
end

-- The job's request if it is for exactly one GPU on one node: {type, prefix, tasks, pin_node, per_gpu, per_task}.
-- Else nil and the reason, as a user would say it.
function M.of(read, asked)
  local found, several = one_a_field(asked)
  if not found then
    return nil, several
  end
  local gpu, other = one_gpu(found)
  if not gpu then
    return nil, other
  elseif request.names_several_nodes(read) then
    return nil, request.SEVERAL_NODES
  end
  local tasks, per_gpu = tasks_of(read, found)
  if not tasks then
    return nil, per_gpu
  end
  local max_nodes = read("max_nodes")
  if max_nodes == 0 then
    max_nodes = nil
  end
  local reason = may_be_several(read, found, tasks, max_nodes)
  if reason then
    return nil, reason
  end
  return {
    type = gpu.type,
    prefix = gpu.prefix,
    tasks = tasks,
    pin_node = max_nodes ~= 1 and (max_nodes ~= nil or tasks > 1),
    per_gpu = per_gpu,
    per_task = found.tres_per_task ~= nil,
  }
end

-- Takes off a binding that says nothing with one task on one GPU: --gpus-per-task=1 implies it. The reason if something
-- else is asked for that only whole GPUs can do.
local function unbind(read, single, wanted)
  local bind = read("tres_bind")
  if read("tres_freq") then
    return "--gpu-freq works on whole GPUs only"
  elseif not bind then
    return nil
  elseif not (single.per_task and bind:match("^gres[:/]gpu:per_task:1$")) then
    return "--gpu-bind works on whole GPUs only"
  end
  wanted.tres_bind = ""
  return nil
end

-- The GPU's CPUs as those of the tasks. The reason if that cannot be.
local function plain_cpus(read, single, wanted, default_cpus)
  local cpus = not read("cpus_per_task") and default_cpus or nil
  if read("cpus_per_tres") then
    cpus = request.per_gpu_number(read("cpus_per_tres"))
    if not cpus then
      return "its --cpus-per-gpu is not understood"
    end
    wanted.cpus_per_tres = ""
  end
  if cpus then
    local per_task = math.max(1, cpus / single.tasks)
    if per_task % 1 ~= 0 then
      return string.format("%d CPUs a GPU cannot be split evenly over %d tasks", cpus, single.tasks)
    end
    wanted.cpus_per_task = per_task
    wanted.min_cpus = math.max(read("min_cpus") or 1, per_task * single.tasks)
  end
  return nil
end

-- The GPU's memory as the node's. The reason if that cannot be.
local function plain_memory(read, wanted, default_mem_mib)
  if read("mem_per_tres") then
    local mem_mib = request.per_gpu_number(read("mem_per_tres"))
    if not mem_mib then
      return "its --mem-per-gpu is not understood"
    end
    wanted.mem_per_tres = ""
    wanted.min_mem_per_node = mem_mib
  elseif default_mem_mib and not read("min_mem_per_node") and not read("min_mem_per_cpu") then
    wanted.min_mem_per_node = default_mem_mib
  end
  return nil
end

-- What belongs to the GPU, as plain CPU and memory requests: shards know no --mem-per-gpu and the like, and Slurm
-- refuses them together. `default_cpus` and `default_mem_mib` are the partition's DefCpuPerGPU and DefMemPerGPU.
-- The changes as {field = value}, or nil and the reason.
function M.carry_along(read, single, default_cpus, default_mem_mib)
  local wanted = {}
  local reason = unbind(read, single, wanted)
    or plain_cpus(read, single, wanted, default_cpus)
    or plain_memory(read, wanted, default_mem_mib)
  if reason then
    return nil, reason
  end
  if single.per_gpu then
    wanted.ntasks_per_tres = slurm.NO_VAL16
    wanted.num_tasks = single.tasks
  end
  return wanted
end

local function cpus_only(text)
  local kept = {}
  for _, item in ipairs(request.parse(text)) do
    if item.name == "cpu" then
      kept[#kept + 1] = item.text
    end
  end
  return table.concat(kept, ",")
end

-- `what` ("gpu:1", "shard:v100_0:2") as the job's only one, per node, added to `wanted`.
function M.per_node(read, single, wanted, prefix, what)
  for _, field in ipairs(request.FIELDS) do
    if field == "tres_per_task" and read(field) then
      wanted[field] = cpus_only(read(field))
    elseif field ~= "tres_per_node" and read(field) then
      wanted[field] = ""
    end
  end
  wanted.tres_per_node = prefix .. what
  if single.pin_node then
    wanted.min_nodes, wanted.max_nodes = 1, 1
  end
  return wanted
end

-- Whether the job says how much memory it needs. Else Slurm's default counts, which may be so much a CPU.
local function names_memory(read, wanted)
  return wanted.min_mem_per_node or read("min_mem_per_node") or read("min_mem_per_cpu")
end

-- `cpus` in all, as a workload's curve says, in place of the CPUs in `wanted` (made by `carry_along` and `per_node`) and
-- in the job. Memory stays what it was. The CPUs that it asks for now, and those before; false and the CPUs before
-- where fewer might mean less memory than the job needs.
function M.with_cpus(read, single, wanted, cpus)
  local before = wanted.cpus_per_task or read("cpus_per_task") or 1
  local per_task = math.max(1, math.ceil(cpus / single.tasks))
  if per_task < before and not names_memory(read, wanted) then
    return false, before * single.tasks
  elseif per_task ~= before then
    if read("min_mem_per_cpu") and not wanted.min_mem_per_node then
      wanted.min_mem_per_node = read("min_mem_per_cpu") * before * single.tasks
    end
    wanted.cpus_per_task = per_task
    wanted.min_cpus = per_task * single.tasks
    if (read("pn_min_cpus") or 0) <= before then -- else it is the user's own --mincpus
      wanted.pn_min_cpus = per_task
    end
    if wanted.tres_per_task and wanted.tres_per_task ~= "" then
      wanted.tres_per_task = string.format("cpu%s%d", wanted.tres_per_task:match("[:=]") or "=", per_task)
    end
  end
  return per_task * single.tasks, before * single.tasks
end

return M
