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

local function names(text)
  local set = {}
  for name in text:gmatch("[^,%s]+") do
    set[name] = true
  end
  return set
end

local function per_partition(text)
  local result = {}
  for item in text:gmatch("[^,%s]+") do
    local name, value = item:match("^(.+):(%d+)$")
    if not name then
      return nil
    end
    result[name] = tonumber(value)
  end
  return result
end

-- "22.05.8" -> 220508, so that versions compare as numbers. Empty or odd: nil, taken for a recent release.
local function version(text)
  local major, minor, micro = text:match("(%d+)%.(%d+)%.?(%d*)")
  if not major then
    return false
  end
  return tonumber(major) * 10000 + tonumber(minor) * 100 + (tonumber(micro) or 0)
end

local function text_of(text)
  return text
end

-- Key (lower case) -> {attribute, parser, default as text}. The defaults are those of slurm_gpushare/config.py.
M.KEYS = {
  partitions = { "partitions", names, "" },
  shardspergpu = { "shards_per_gpu", number(2, 64), "2" },
  gpumodel = { "gpu_model", text_of, "v100" },
  gpuspernode = { "gpus_per_node", number(1, 64), "4" },
  slurmversion = { "slurm_version", version, "" },
  defcpupergpu = { "def_cpu_per_gpu", per_partition, "" },
  defmempergpu = { "def_mem_per_gpu_mib", per_partition, "" },
  hookfile = { "hook_file", text_of, "/var/lib/gpushare/hook.sqlite" },
  leaseseconds = { "lease_s", number(1, 600), "30" },
  heartbeatseconds = { "heartbeat_s", number(5, 3600), "60" },
  policy = { "policy", choice("gpushare", "paper", "fcfs", "random", "off"), "gpushare" },
  rawshards = { "raw_shards", choice("deny", "allow"), "deny" },
}

-- The settings in `text`, or nil and why not. Keys of other programs' concern are passed over.
function M.parse(text)
  local given = {}
  for line in (text .. "\n"):gmatch("(.-)\r?\n") do
    local name, value = line:gsub("#.*", ""):match("^%s*([%w_]+)%s*=%s*(.-)%s*$")
    if name then
      given[name:lower()] = value
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

local cached_text, cached, cached_why, looked_at

-- The settings in force, or nil and why not. The file is looked at again once a second at most.
function M.current(path)
  local now = os.time()
  if looked_at == now then
    return cached, cached_why
  end
  looked_at = now
  path = path or M.path()
  local file, why = io.open(path, "r")
  if not file then
    cached_text, cached, cached_why = nil, nil, why or (path .. ": cannot be read")
    return nil, cached_why
  end
  local text = file:read("*a") or ""
  file:close()
  if text ~= cached_text then
    cached_text = text
    cached, cached_why = M.parse(text)
    cached_why = cached_why and (path .. ": " .. cached_why)
  end
  return cached, cached_why
end

function M.forget()
  looked_at = nil
end

return M
