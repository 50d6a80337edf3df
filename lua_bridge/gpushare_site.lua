-- What the hook knows of the site: its settings, its partitions, and which GPU models and how many CPUs they have for a job.

local load, site = ...
local jobs = load("gpushare_job")
local KEYS, PLACES = load("gpushare_protocol").KEYS, load("gpushare_protocol").PLACES
local request = load("gpushare_request")

local M = {}

-- Settings: gpushare.conf, and the file that `gpushare configure` writes beside it.

local function trimmed(text)
  return text:match("^[ \t\r]*(.-)[ \t\r]*$")
end

-- The items of a list with commas, and the set of them; nil if one has a blank in it, or comes twice where it may not.
local function items(text, once)
  local list, set = {}, {}
  for part in text:gmatch("[^,]+") do
    local item = trimmed(part)
    if item:find("[ \t\r]") or (once and set[item]) then
      return nil
    elseif item ~= "" then
      list[#list + 1], set[item] = item, true
    end
  end
  return list, set
end

-- A parser for each kind of value: text and key in, value out, nil if the text is none.
local PARSERS = {}

function PARSERS.whole(text, key)
  local value = text:match("^%d+$") and tonumber(text)
  return value and value >= tonumber(key.bounds[1]) and value <= tonumber(key.bounds[2]) and value or nil
end

function PARSERS.choice(text, key)
  for _, word in ipairs(key.bounds) do
    if text:lower() == word then
      return word
    end
  end
  return nil
end

function PARSERS.names(text)
  local _, set = items(text)
  return set
end

function PARSERS.models(text)
  local list, set = items(text, true)
  return list and list[1] and set or nil
end

function PARSERS.per_partition(text)
  local list, result = items(text), {}
  for _, item in ipairs(list or {}) do
    local name, value = item:match("^(.+):(%d+)$")
    if not name then
      return nil
    end
    result[name] = tonumber(value)
  end
  return list and result
end

-- "22.05.8" -> 220508, so that versions compare as numbers. Empty or odd: taken for a recent release.
function PARSERS.version(text)
  local major, minor, micro = text:match("(%d+)%.(%d+)%.?(%d*)")
  return major and tonumber(major) * 10000 + tonumber(minor) * 100 + (tonumber(micro) or 0) or math.huge
end

function PARSERS.path(text)
  return text:sub(1, 1) == "/" and text or nil
end

local EMPTY = "there is no setting in it" -- a full disk or a cut-off copy leaves such files

-- The settings in `text` by key, without those of `left_out` places; nil and why not if something else is in it.
local function read(text, left_out)
  local given = {}
  for line in text:gmatch("[^\n]+") do
    line = trimmed(line:gsub("#.*", ""))
    local name, value = line:match("^([^=]-)[ \t\r]*=[ \t\r]*(.*)$")
    local key = name and name:lower()
    if line ~= "" and (not PLACES[key] or given[key]) then
      return nil, "bad line: " .. line
    elseif line ~= "" and PLACES[key] ~= left_out then
      given[key] = value
    end
  end
  return given
end

-- The settings in the texts of gpushare.conf and of the generated file, where there is one; nil and why not.
function M.parse(text, generated)
  local given, why = read(text)
  local worked_out = {}
  if given and generated then
    worked_out, why = read(generated, "site")
    if worked_out and next(worked_out) == nil then
      return nil, EMPTY
    end
  end
  if not (given and worked_out) then
    return nil, why
  end
  local settings = {}
  for key, rule in pairs(KEYS) do
    local value = PARSERS[rule.kind](worked_out[key] or given[key] or rule.default, rule)
    if value == nil then
      return nil, "bad value for " .. key
    end
    settings[rule.attribute] = value
  end
  return settings
end

local function variable(name)
  local value = os.getenv(name)
  return value ~= "" and value or nil
end

-- Where the file is: GPUSHARE_CONF, else beside slurm.conf, else the usual place.
local function conf_path()
  local beside = (variable("SLURM_CONF") or ""):match("^(.*/)") or "/etc/slurm/"
  return variable("GPUSHARE_CONF") or beside .. "gpushare.conf"
end

-- Where the helper keeps the last settings that it could read (slurm_gpushare/protocol/settings_in_force.py).
local function last_good(path)
  local text = jobs.text_of(variable("GPUSHARE_LAST_GOOD") or "/var/lib/gpushare/gpushare.conf.good")
  if not text or text:match("^[^\n]*") ~= "# last good settings of " .. path then
    return nil
  end
  return (M.parse(text))
end

-- The settings in the files as they are now; nil and what is wrong with them.
local function from_files(path)
  local text, why = jobs.text_of(path)
  local generated, no_generated, absent = jobs.text_of((path:gsub("%.conf$", "")) .. ".generated.conf")
  if not text or not (generated or absent) then
    return nil, text and no_generated or why
  elseif not text:gsub("#[^\n]*", ""):find("%S") then
    return nil, path .. ": " .. EMPTY
  end
  local found, fault = M.parse(text, generated)
  return found, fault and path .. ": " .. fault
end

local settings, fault, looked_at

-- The settings in force, or nil, and what is wrong with the files: the last good ones stay. Looked at once a second at most.
function M.settings()
  local now = os.time()
  if looked_at ~= now then
    looked_at = now
    local path, found = conf_path(), nil
    found, fault = from_files(path)
    settings = found or settings or last_good(path)
  end
  return settings, fault
end

-- Nodes. Several partitions may have the same nodes, so a partition's name alone does not say whether they share.

-- A partition with more nodes than this is taken to have nodes that share: the names are gone through one by one.
local MOST_NODES = 100000

-- Adds the names of one item, "gpu[0-2,7]" or "r[0-1]n[0-9]" with ";" for its commas, to a set of `size` names; the size.
local function add_item(set, item, size)
  local before, inside, after = item:match("^([^%[]*)%[([^%]]*)%](.*)$")
  if not before then
    set[item] = true
    return size + 1
  end
  for part in inside:gmatch("[^;]+") do
    local low, high = part:match("^(%d+)%-(%d+)$")
    low = low or part
    for number = tonumber(low) or 0, tonumber(high or low) or 0 do
      if size <= MOST_NODES then
        size = add_item(set, before .. string.format("%0" .. #low .. "d", number) .. after, size)
      end
    end
  end
  return size
end

-- The names in a list as Slurm writes it, and how many they are.
local function nodes_in(list)
  local set, size = {}, 0
  local apart = list:gsub("%b[]", function(inside)
    return (inside:gsub(",", ";"))
  end)
  for item in apart:gmatch("[^,]+") do
    size = add_item(set, item, size)
  end
  return set, size
end

-- The answers for each list of nodes that share: they change only when somebody changes Slurm's configuration.
local MOST_LISTS = 16
local answers, lists = {}, 0

-- Whether two lists of nodes have a name in common.
local function overlap(ours, theirs)
  if theirs:upper() == "ALL" then
    return ours ~= ""
  elseif not answers[ours] then
    answers, lists = lists < MOST_LISTS and answers or {}, lists % MOST_LISTS + 1
    answers[ours] = {}
  end
  if answers[ours][theirs] == nil then
    local set, others, size = nodes_in(ours), nodes_in(theirs)
    local found = size > MOST_NODES
    for name in pairs(others) do
      found = found or set[name] or false
    end
    answers[ours][theirs] = found
  end
  return answers[ours][theirs]
end

-- Partitions.

-- The names in a job's partition field, the default one if it has none.
local function partition_names(text, part_list)
  local list = {}
  for name in (text or ""):gmatch("[^,]+") do
    list[#list + 1] = name
  end
  for name, partition in pairs(#list == 0 and part_list or {}) do
    if jobs.reader(partition, jobs.PARTITION)("flag_default") == 1 then
      list[1] = name
    end
  end
  return list
end

-- The nodes of a partition as Slurm writes them; "" if this user has no such partition.
local function nodes_of(part_list, name)
  return jobs.reader((part_list or {})[name] or {}, jobs.PARTITION)("nodes") or ""
end

-- Whether a partition has nodes that share: those that `configure` knew, or those of the `shared` partitions.
local function has_sharing_nodes(part_list, name, shared)
  local nodes = nodes_of(part_list, name)
  for _, names in pairs(site.models) do
    if overlap(names, nodes) then
      return true
    end
  end
  for other in pairs(shared) do
    if overlap(nodes_of(part_list, other), nodes) then
      return true
    end
  end
  return false
end

-- Where a job with this partition field may run: {list, all_shared, ours = whether one of them has nodes that share}.
function M.place(text, part_list, settings)
  if text and #text > jobs.LONGEST then
    return { list = {}, all_shared = false, ours = true }
  end
  local shared = settings and settings.partitions or {}
  local list = partition_names(text, part_list)
  local all_shared, ours = #list > 0, false
  for _, name in ipairs(list) do
    all_shared = all_shared and shared[name] or false
    ours = ours or shared[name] or has_sharing_nodes(part_list, name, shared)
  end
  return { list = list, all_shared = all_shared, ours = ours }
end

-- The models whose GPUs have one type an index, so that gpu:MODEL is a name of ours.
function M.models(settings)
  local found = {}
  for _, models in ipairs({ site.models, settings and settings.gpu_models or {} }) do
    for model in pairs(models) do
      found[model] = true
    end
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
      found[model] = found[model] or having == nil or overlap(having, nodes_of(part_list, name)) or nil
    end
  end
  return found
end

-- How many CPUs of a node a job may have in all of these partitions: MaxCPUsPerNode, and what a node has on average.
function M.most_cpus(part_list, list)
  local most = math.huge
  for _, name in ipairs(list) do
    local value = jobs.reader((part_list or {})[name] or {}, jobs.PARTITION)
    local cpus, nodes = value("total_cpus") or 0, value("total_nodes") or 0
    if cpus > 0 and nodes > 0 then
      most = math.min(most, math.floor(cpus / nodes))
    end
    most = math.min(most, value("max_cpus_per_node") or most)
  end
  return math.max(1, most)
end

return M
