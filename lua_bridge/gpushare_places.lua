-- Where a job may run: its partitions, whether they have nodes that share, and which GPU models and how many CPUs they
-- have for it.

local load, site = ...
local fields = load("gpushare_fields")
local nodes = load("gpushare_nodes")
local request = load("gpushare_request")

local M = {}

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
function M.of(text, part_list, settings)
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

-- The models whose GPUs have one type an index, so that gpu:MODEL is a name of ours.
function M.models(settings)
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
function M.possible_models(list, part_list, settings, features)
  local named = request.named_model(features, settings.gpu_models)
  local found = {}
  for model in pairs(settings.gpu_models) do
    local having = site.models[model] -- nil: `configure` did not know it yet
    for _, name in ipairs((not named or named == model) and list or {}) do
      found[model] = found[model] or having == nil or nodes.overlap(having, nodes_of(part_list, name)) or nil
    end
  end
  return found
end

-- How many CPUs of a node a job may have in all of these partitions: MaxCPUsPerNode, and what a node has on average.
function M.most_cpus(part_list, list)
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

return M
