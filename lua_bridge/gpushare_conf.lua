-- gpushare.conf as the hook needs it: a few keys of the file that `gpushare configure` writes.

local M = {}

local function number(low, high)
  return function(text)
    local value = text:match("^%d+$") and tonumber(text)
    if not value or value < low or value > high then
      return nil
    end
    return value
  end
end

local function choice(...)
  local allowed = { ... }
  return function(text)
    for _, value in ipairs(allowed) do
      if text:lower() == value then
        return value
      end
    end
    return nil
  end
end

-- The items of a list with commas; nil if one of them has a blank in it.
local function items(text)
  local list = {}
  for part in text:gmatch("[^,]+") do
    local item = part:match("^[ \t\r]*(.-)[ \t\r]*$")
    if item:find("[ \t\r]") then
      return nil
    elseif item ~= "" then
      list[#list + 1] = item
    end
  end
  return list
end

local function names(text)
  local list, set = items(text), {}
  for _, name in ipairs(list or {}) do
    set[name] = true
  end
  return list and set
end

-- The same for names of which there must be one, and each once.
local function models(text)
  local list, set, count = items(text), names(text), 0
  for _ in pairs(set or {}) do
    count = count + 1
  end
  return list and count > 0 and count == #list and set or nil
end

local function per_partition(text)
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

-- "22.05.8" -> 220508, so that versions compare as numbers. Empty or odd: false, taken for a recent release.
local function version(text)
  local major, minor, micro = text:match("(%d+)%.(%d+)%.?(%d*)")
  if not major then
    return false
  end
  return tonumber(major) * 10000 + tonumber(minor) * 100 + (tonumber(micro) or 0)
end

local function path_of(text)
  return text:sub(1, 1) == "/" and text or nil
end

-- Key (lower case) -> {attribute, parser, default as text}. The defaults are those of slurm_gpushare/protocol/settings.py.
M.KEYS = {
  partitions = { "partitions", names, "" },
  shardspergpu = { "shards_per_gpu", number(2, 64), "2" },
  gpumodel = { "gpu_models", models, "v100" },
  gpuspernode = { "gpus_per_node", number(1, 64), "4" },
  slurmversion = { "slurm_version", version, "" },
  defcpupergpu = { "def_cpu_per_gpu", per_partition, "" },
  defmempergpu = { "def_mem_per_gpu_mib", per_partition, "" },
  hookfile = { "hook_file", path_of, "/var/lib/gpushare/hook.sqlite" },
  leaseseconds = { "lease_s", number(1, 600), "30" },
  heartbeatseconds = { "heartbeat_s", number(5, 3600), "60" },
  policy = { "policy", choice("gpushare", "paper", "fcfs", "random", "shadow", "off"), "gpushare" },
  sharegangs = { "share_gangs", choice("yes", "no"), "no" },
  rawshards = { "raw_shards", choice("deny", "allow"), "deny" },
}

-- Keys of other programs' concern: their values are passed over.
M.OTHERS = {}
for key in ([[
  storeurl spooldir recordsto mungesocket slurmuser nodeusers statedir publicdir dcgmjobmappingdir
  sampleseconds interimseconds probeseconds backend tickseconds epiloghold keepdays objective shareacross
  residentbudget guestcap memoryheadroom extendtimelimit onslowdown frameworkmemory pausemost
]]):gmatch("%S+") do
  M.OTHERS[key] = true
end

-- The settings in `text`, or nil and why not.
function M.parse(text)
  local given = {}
  for line in (text .. "\n"):gmatch("(.-)\n") do
    line = line:gsub("#.*", ""):match("^[ \t\r]*(.-)[ \t\r]*$")
    if line ~= "" then
      local name, value = line:match("^([^=]-)[ \t\r]*=[ \t\r]*(.*)$")
      local key = name and name:lower()
      if not key or not (M.KEYS[key] or M.OTHERS[key]) or given[key] then
        return nil, "bad line: " .. line
      end
      given[key] = value
    end
  end
  local settings = {}
  for key, rule in pairs(M.KEYS) do
    local value = rule[2](given[key] or rule[3])
    if value == nil then
      return nil, "bad value for " .. key
    end
    settings[rule[1]] = value
  end
  return settings
end

-- Where the file is: GPUSHARE_CONF, else beside slurm.conf, else the usual place.
function M.path()
  local explicit = os.getenv("GPUSHARE_CONF")
  if explicit and explicit ~= "" then
    return explicit
  end
  local slurm_conf = os.getenv("SLURM_CONF")
  if slurm_conf and slurm_conf:find("/", 1, true) then
    return (slurm_conf:gsub("[^/]*$", "")) .. "gpushare.conf"
  end
  return "/etc/slurm/gpushare.conf"
end

-- Where the helper keeps the last gpushare.conf that it could read (slurm_gpushare/protocol/settings_in_force.py).
local function last_good(path)
  local copy = os.getenv("GPUSHARE_LAST_GOOD")
  local file = io.open(copy and copy ~= "" and copy or "/var/lib/gpushare/gpushare.conf.good", "r")
  if not file then
    return nil
  end
  local text = file:read("*a") or ""
  file:close()
  if text:match("^[^\n]*") ~= "# last good settings of " .. path then
    return nil
  end
  return (M.parse(text))
end

-- Whether a file has no setting at all: a full disk or a cut-off copy leaves such files.
local function is_empty(text)
  for line in text:gmatch("[^\n]+") do
    if line:gsub("#.*", ""):find("[^ \t\r]") then
      return false
    end
  end
  return true
end

local cached_text, cached, cached_why, looked_at

-- The settings in force, or nil, and what is wrong with the file if something is: then the last good ones stay in force.
-- The file is looked at again once a second at most.
function M.current()
  local now = os.time()
  if looked_at == now then
    return cached, cached_why
  end
  looked_at = now
  local path = M.path()
  local file, why = io.open(path, "r")
  local text = file and file:read("*a")
  if file then
    file:close()
  end
  if not text then
    cached_text, cached_why = nil, why or (path .. ": cannot be read")
  elseif text ~= cached_text then
    local found
    if is_empty(text) then
      cached_why = "there is no setting in it"
    else
      found, cached_why = M.parse(text)
    end
    cached_text, cached = text, found or cached
    cached_why = cached_why and (path .. ": " .. cached_why)
  end
  if not cached then
    cached = last_good(path)
  end
  return cached, cached_why
end

return M
