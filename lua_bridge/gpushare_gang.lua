-- A gang: a job that asks for all GPUs of one node. Two of them can share the node's cards.
-- Slurm gives a job part of every card only where it asks for shards by task, one task a card, so a gang is written with
-- as many tasks as it has GPUs. Its own number of tasks goes to the task prolog, which shows it to the script.
-- Pure functions: strings and numbers in, tables out.

local load = ...
local request = load("gpushare_request")

local M = {}

-- The one untyped request for GPUs, and the field that it is in; nil and the reason if it is not that simple.
local function only_request(asked)
  local found, where
  for _, field in ipairs(request.FIELDS) do
    for _, item in ipairs(request.without_cpus(field, asked[field])) do
      if found then
        return nil, "it asks for several kinds of resources"
      end
      found, where = item, field
    end
  end
  if not found then
    return nil, "it asks for no GPU"
  elseif found.name ~= "gpu" or found.odd or found.type then
    return nil, "it asks for more than plain GPUs"
  elseif where == "tres_per_task" or where == "tres_per_socket" then
    return nil, "it binds GPUs to tasks or sockets"
  end
  return found, where
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
  return read("tres_bind") ~= nil
end

-- The job's request if it is for all `gpus` GPUs of one node: {gpus, tasks, said_tasks (whether it says how many), cpus
-- (a task, if it says so)}.
-- nil if it is for another number of them; nil and the reason if it is, but cannot share.
function M.of(read, asked, gpus)
  local item, where = only_request(asked)
  if not item or gpus < 2 or item.count ~= gpus then
    return nil, item == nil and where or nil
  end
  local min_nodes, max_nodes = read("min_nodes"), read("max_nodes")
  local tasks, said_tasks = request.tasks(read)
  if min_nodes and min_nodes > 1 then
    return nil, "it asks for more than one node"
  elseif max_nodes ~= 1 and tasks ~= 1 then
    return nil, "it may run on more than one node (add -N 1)"
  elseif max_nodes and max_nodes > 1 and where ~= "tres_per_job" then
    return nil, "it may run on more than one node (add -N 1)"
  elseif request.names_several_nodes(read) then
    return nil, request.SEVERAL_NODES
  elseif binds_tasks(read) or read("tres_freq") then
    return nil, "it binds tasks or sets the clock of its GPUs"
  end
  return { gpus = gpus, tasks = tasks, said_tasks = said_tasks, cpus = read("cpus_per_task") }
end

-- CPUs for each card: what the job asks for, split evenly and rounded up. nil and the reason if that is not understood.
local function cpus_a_card(read, gang, default_cpus)
  if read("cpus_per_tres") then
    local cpus = request.per_gpu_number(read("cpus_per_tres"))
    return cpus or nil, "its --cpus-per-gpu is not understood"
  elseif gang.cpus or not default_cpus then
    return math.ceil(gang.tasks * (gang.cpus or 1) / gang.gpus)
  end
  return math.max(default_cpus, math.ceil(gang.tasks / gang.gpus))
end

-- Memory for the node where it is asked for by GPU or by CPU: by card it would be another amount.
local function memory_mib(read, gang, default_mem_mib)
  if read("mem_per_tres") then
    local mem_mib = request.per_gpu_number(read("mem_per_tres"))
    return mem_mib and mem_mib * gang.gpus or nil, "its --mem-per-gpu is not understood"
  elseif read("min_mem_per_cpu") then
    return read("min_mem_per_cpu") * gang.tasks * (gang.cpus or 1)
  elseif default_mem_mib and not read("min_mem_per_node") then
    return default_mem_mib * gang.gpus
  end
  return nil
end

-- The fields of a gang that has `shards` of every card: {field = value}, or nil and the reason.
function M.by_card(read, gang, shards, default_cpus, default_mem_mib)
  local cpus, why = cpus_a_card(read, gang, default_cpus)
  if not cpus then
    return nil, why
  end
  local mem_mib, unclear = memory_mib(read, gang, default_mem_mib)
  if not mem_mib and unclear then
    return nil, unclear
  end
  local wanted = {
    num_tasks = gang.gpus,
    cpus_per_task = cpus,
    min_cpus = cpus * gang.gpus,
    min_nodes = 1,
    max_nodes = 1,
    min_mem_per_node = mem_mib,
  }
  for _, field in ipairs({ "tres_per_job", "tres_per_node", "cpus_per_tres", "mem_per_tres" }) do
    if read(field) then
      wanted[field] = ""
    end
  end
  if read("ntasks_per_node") then
    wanted.ntasks_per_node = gang.gpus
  end
  wanted.tres_per_task = string.format("gres/shard:%d", shards)
  return wanted
end

-- What the task prolog must know to show the script its own request: GPUs, tasks, CPUs a task. 0: it did not say, and
-- Slurm would not either; frameworks take SLURM_NTASKS for a sign that srun has started them. CPUs that were rounded up
-- are shown as well: while a step leaves some of them, but too few for the next, Slurm (24.11) refuses the next one
-- instead of letting it wait.
function M.for_script(gang)
  local held = math.ceil(gang.tasks * (gang.cpus or 0) / gang.gpus) * gang.gpus
  return string.format("%d:%d:%d", gang.gpus, gang.said_tasks and gang.tasks or 0, math.floor(held / gang.tasks))
end

return M
