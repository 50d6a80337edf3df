-- gpushare.conf, and the file that `gpushare configure` writes beside it, as far as the hook needs them.

local load = ...
local KEYS, PLACES = load("gpushare_protocol").KEYS, load("gpushare_protocol").PLACES

local M = {}

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
  local list, set = items(text), {}
  for _, name in ipairs(list or {}) do
    set[name] = true
  end
  return list and set
end

-- Names of which there must be one, and each once.
function PARSERS.models(text)
  local list, set, count = items(text), PARSERS.names(text), 0
  for _ in pairs(set or {}) do
    count = count + 1
  end
  return list and count > 0 and count == #list and set or nil
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

local EMPTY = "there is no setting in it"

-- The settings in `text` by key, nil and why not if something else is in it.
local function read(text)
  local given = {}
  for line in (text .. "\n"):gmatch("(.-)\n") do
    line = line:gsub("#.*", ""):match("^[ \t\r]*(.-)[ \t\r]*$")
    if line ~= "" then
      local name, value = line:match("^([^=]-)[ \t\r]*=[ \t\r]*(.*)$")
      local key = name and name:lower()
      if not key or not PLACES[key] or given[key] then
        return nil, "bad line: " .. line
      end
      given[key] = value
    end
  end
  return given
end

-- What the generated file says of its own keys; nil and why not.
local function read_generated(text)
  local given, why = read(text)
  for key in pairs(given or {}) do
    if PLACES[key] == "site" then
      given[key] = nil
    end
  end
  if given and next(given) == nil then
    return nil, EMPTY
  end
  return given, why
end

-- The settings in the texts of gpushare.conf and of the generated file, where there is one; nil and why not.
-- `moved` in them has the keys of gpushare.conf that belong elsewhere.
function M.parse(text, generated)
  local given, why = read(text)
  local worked_out = {}
  if given and generated then
    worked_out, why = read_generated(generated)
  end
  if not (given and worked_out) then
    return nil, why
  end
  local settings, moved = {}, {}
  for key, rule in pairs(KEYS) do
    local value = PARSERS[rule.kind](worked_out[key] or given[key] or rule.default, rule)
    if value == nil then
      return nil, "bad value for " .. key
    end
    settings[rule.attribute] = value
  end
  for key in pairs(given) do
    if PLACES[key] ~= "site" then
      moved[#moved + 1] = key
    end
  end
  table.sort(moved)
  settings.moved = #moved > 0 and table.concat(moved, ", ") or nil
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

-- A file's text; nil, why not, and whether there is none.
local function text_of(path)
  local file, why, code = io.open(path, "r")
  local text = file and file:read("*a")
  if file then
    file:close()
  end
  return text, why or (path .. ": cannot be read"), code == 2
end

-- Where the helper keeps the last settings that it could read (slurm_gpushare/protocol/settings_in_force.py).
local function last_good(path)
  local copy = os.getenv("GPUSHARE_LAST_GOOD")
  local text = text_of(copy and copy ~= "" and copy or "/var/lib/gpushare/gpushare.conf.good")
  if not text or text:match("^[^\n]*") ~= "# last good settings of " .. path then
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

local cached_text, cached_generated, cached, cached_why, looked_at

-- The settings in force, or nil, and what is wrong with the files if something is: then the last good ones stay in force.
-- The files are looked at again once a second at most.
function M.current()
  local now = os.time()
  if looked_at == now then
    return cached, cached_why
  end
  looked_at = now
  local path = M.path()
  local text, why = text_of(path)
  local generated, no_generated, absent = text_of((path:gsub("%.conf$", "")) .. ".generated.conf")
  if not text or not (generated or absent) then
    cached_text, cached_why = nil, text and no_generated or why
  elseif text ~= cached_text or generated ~= cached_generated then
    local found
    if is_empty(text) then
      cached_why = EMPTY
    else
      found, cached_why = M.parse(text, generated)
    end
    cached_text, cached_generated, cached = text, generated, found or cached
    cached_why = cached_why and (path .. ": " .. cached_why)
  end
  if not cached then
    cached = last_good(path)
  end
  return cached, cached_why
end

return M
