-- slurm-gpushare in the user's own sbatch, salloc and srun (cli_filter/lua).
--
-- Two things that only the client can do: turn a workload's name into its token, so that the name never leaves the
-- user's side; and make srun work inside a job that has shards, whatever its script asks of srun.
-- Whatever breaks in here, the command goes on as the user wrote it.

local M = {}

local TOKEN = "^gs%-[a-z2-7]+$"

local function tokens_path()
  local base = os.getenv("XDG_CONFIG_HOME") or ""
  if base:sub(1, 1) ~= "/" then
    base = (os.getenv("HOME") or "") .. "/.config"
  end
  return base .. "/gpushare/tokens"
end

-- The token of `name` in the user's own file ("TOKEN NAME" a line), or nil.
function M.find_token(name, path)
  local file = io.open(path or tokens_path(), "r")
  if not file then
    return nil
  end
  local found
  for line in file:lines() do
    local token, rest = line:match("^(%S+) (.-)%s*$")
    if token and token:match(TOKEN) and rest:gsub("^%s+", "") == name then
      found = token
      break
    end
  end
  file:close()
  return found
end

-- The comment with the name replaced by its token. Second value: what to tell the user.
-- A name without a token is taken out: it must not reach the controller.
function M.with_token(comment, path)
  local before, word, options = (" " .. comment):match("^(.-%s)gpushare:([^,]*)(.*)$")
  if not before or word:match("^%s*$") then
    return comment
  end
  local first, rest = word:match("^(%S+)(.*)$")
  if first and first:match(TOKEN) then
    return comment
  end
  local name = word:gsub("^%s+", ""):gsub("%s+$", "")
  local token = M.find_token(name, path)
  if token then
    rest = ""
  elseif first then
    name, token = first, M.find_token(first, path)
  end
  before = before:sub(2)
  if token then
    return before .. "gpushare:" .. token .. (rest or "") .. options
  end
  return before .. "gpushare:?" .. options,
    "no token is called '" .. name .. "': make one with 'gpushare token NAME'. The job is submitted without sharing"
end

-- How many GPUs "2", "v100:2", "gpu:v100:1" or "gres/gpu=1" are; nil if there is none in it.
local function gpus_in(text, option)
  local item = text:match("^[^,]+$")
  if not item then
    return nil
  end
  item = item:gsub("^gres[:/]", "")
  if option == "gres" or option == "tres-per-task" then
    if not item:match("^gpu$") and not item:match("^gpu[:=]") then
      return nil
    end
    item = item:gsub("^gpu[:=]?", "")
  end
  return tonumber(item:match("(%d+)$") or "1")
end

local function is_set(value)
  return value ~= nil and value ~= "" and value ~= "unset"
end

local GPU_OPTIONS = { "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task", "gres" }

-- What a step of a job with `shards` must ask for instead: {option = value}, or nil if it can stay as it is.
function M.step_options(get, shards)
  local wanted = {}
  for _, option in ipairs(GPU_OPTIONS) do
    local value = get(option)
    if is_set(value) then
      local count = gpus_in(value, option)
      if count == nil then
        if option == "gres" then
          return nil -- the step's own choice: shards, none, or something else
        end
      elseif count ~= 1 then
        return nil -- would fail on a whole GPU too
      elseif option:match("per%-task$") and (tonumber(get("ntasks") or "1") or 1) > 1 then
        return nil
      else
        wanted[option] = ""
      end
    end
  end
  -- There is one GPU to bind to, and 26.05 hides it from a step that binds shards as if they were GPUs. 22.05 has no
  -- --tres-bind; later releases keep both options' value there.
  local bind = get("tres-bind")
  if is_set(bind) and bind:find("gpu", 1, true) then
    wanted["tres-bind"] = "gres/shard:none"
  elseif is_set(get("gpu-bind")) then
    wanted["gpu-bind"] = "none"
  end
  wanted.gres = "shard:" .. shards
  return wanted
end

local function translate_name(options)
  local comment = options.comment
  if type(comment) == "string" and comment:find("gpushare:", 1, true) then
    local replaced, line = M.with_token(comment)
    if replaced ~= comment then
      options.comment = replaced
    end
    if line then
      slurm.log_error("%s", "gpushare: " .. line)
    end
  end
end

local function fit_step(options)
  local job = os.getenv("SLURM_JOB_ID")
  local shards = (os.getenv("SLURM_SHARDS_ON_NODE") or ""):match("^%d+$")
  if options.type ~= "srun" or not job or not shards then
    return
  end
  local target = options.jobid
  if target and target ~= job and target:match("^%d+$") then
    return -- a step of some other job
  end
  for option, value in pairs(M.step_options(function(name) return options[name] end, shards) or {}) do
    options[option] = value
  end
end

function M.pre_submit(options, offset)
  for _, step in ipairs({ translate_name, fit_step }) do
    local ok, why = pcall(step, options)
    if not ok then
      pcall(slurm.log_debug, "%s", "gpushare: " .. tostring(why))
    end
  end
  return slurm.SUCCESS
end

return M
