-- slurm-gpushare in the user's own sbatch, salloc and srun (cli_filter/lua). `gpushare configure` writes this file with
-- all that it needs in it. As it is here it loads its modules from beside it.
--
-- Three things that only the client can do: turn a workload's name into its token, so that the name never leaves the
-- user's side; make srun understand gpu:MODEL where every GPU index has a type of its own; and make srun work inside a
-- job that has shards, whatever its script asks of srun.
-- Whatever breaks in here, the command goes on as the user wrote it.

local site = { models = {} } --@site
local modules = {} --@modules

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local loaded = {}

local function load(name)
  if loaded[name] == nil then
    loaded[name] = (modules[name] or assert(loadfile(here .. name .. ".lua")))(load, site)
  end
  return loaded[name]
end

local M = {}

local jobs, request
local ready = pcall(function()
  jobs, request = load("gpushare_job"), load("gpushare_request")
end)

-- Names.

local function tokens_path()
  local base = os.getenv("XDG_CONFIG_HOME") or ""
  if base:sub(1, 1) ~= "/" then
    base = (os.getenv("HOME") or "") .. "/.config"
  end
  return base .. "/gpushare/tokens"
end

local function trimmed(text)
  return text:match("^%s*(.*%S)") or ""
end

local function begins_with(text, name)
  return text:sub(1, #name) == name and (#text == #name or text:find("^%s", #name + 1) ~= nil)
end

-- The longest name in the user's own file ("TOKEN NAME" a line) that `text` begins with, and its token; nil if there is
-- none. Names may have blanks, and so may what follows them.
local function find_name(text)
  local file = io.open(tokens_path(), "r")
  if not file then
    return nil
  end
  local found, found_token
  for line in file:lines() do
    local token, rest = line:match("^(%S+) (.*)$")
    local name = trimmed(rest or "")
    if jobs.is_token(token) and #name > #(found or "") and begins_with(text, name) then
      found, found_token = name, token
    end
  end
  file:close()
  return found, found_token
end

-- How much of `tail`, which follows our word, may be a workload's name: a comma ends it, and so does an option.
local function name_length(tail)
  local longest = (tail:find(",", 1, true) or #tail + 1) - 1
  for blank, word in tail:sub(1, longest):gmatch("()%s(%S+)") do
    if jobs.is_option(word) then
      return blank - 1
    end
  end
  return longest
end

-- The comment with the name replaced by its token. Second value: what to tell the user.
-- A name without a token is taken out: it must not reach the controller.
local function with_token(comment)
  local first, last = (" " .. comment:lower()):find("%sgpushare[:=]") -- any case, as the hook reads it
  if not first then
    return comment
  end
  local before, tail = comment:sub(1, first - 1), comment:sub(last)
  local length = name_length(tail)
  local text = tail:sub(1, length)
  local start = text:match("^%S+")
  if not start or jobs.is_token(start) then
    return comment
  end
  local name, token = find_name(text)
  if name then
    return before .. "gpushare:" .. token .. tail:sub(#name + 1)
  end
  local line = "no token is called '%s': make one with 'gpushare token NAME'. The job is submitted without sharing"
  return before .. "gpushare:?" .. tail:sub(length + 1), line:format(trimmed(text))
end

-- What srun asks of GPUs.

local function is_set(value)
  return value ~= nil and value ~= "" and value ~= "unset"
end

local GPU_OPTIONS = { "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task", "gres" }
local LISTS = { gres = true, ["tres-per-task"] = true }

-- An option's value taken apart. "v100:2", "v100" or "2" are requests like the others as "gpu:v100:2".
local function items_of(option, value)
  return request.parse(LISTS[option] and value or "gpu:" .. value)
end

-- How many GPUs an option's value asks for, and what else a task asks for ("cpu=2,gres/gpu:1": since 24.11 -c writes
-- itself there); nil if it is something else.
local function gpus_in(option, value)
  local count, rest = nil, {}
  for _, item in ipairs(items_of(option, value)) do
    if item.name ~= "gpu" then
      rest[#rest + 1] = item.text
    elseif count or item.odd then
      return nil
    else
      count = item.count
    end
  end
  if #rest > 0 and option ~= "tres-per-task" then
    return nil
  end
  return count, table.concat(rest, ",")
end

-- What srun must ask for instead where it names a GPU by its model: {option = value}, or nil if it may stay as it is.
-- A step takes what its job has; a job also gets the model as a constraint, as the submit hook writes it.
function M.without_model(get, is_step)
  local wanted, model = {}, nil
  for _, option in ipairs(GPU_OPTIONS) do
    local value = get(option)
    if is_set(value) then
      local text, found = request.untyped(items_of(option, value), site.models)
      if found and model and found ~= model then
        return nil
      elseif text then
        wanted[option], model = LISTS[option] and text or text:match("^gpu:(%d+)$"), found
      end
    end
  end
  if not model or is_step then
    return model and wanted or nil
  end
  local constraint = get("constraint")
  wanted.constraint = request.with_feature(is_set(constraint) and constraint or nil, model)
  return wanted.constraint and wanted or nil
end

-- How many of its job's `gpus` a step asks for, and for each of its `tasks` if it says so, with the options that say it
-- emptied: {cards, per_task, options}. nil if it has to stay as it is.
local function step_gpus(get, gpus, tasks)
  local asked = { cards = gpus, options = {} }
  for _, option in ipairs(GPU_OPTIONS) do
    local value = get(option)
    local count, rest
    if is_set(value) then
      count, rest = gpus_in(option, value)
    end
    if count == nil then
      if is_set(value) and option == "gres" then
        return nil -- the step's own choice: shards, none, or something else
      end
    elseif count < 1 or count > gpus then
      return nil -- would fail on whole GPUs too
    elseif option:match("per%-task$") and tasks > 1 then
      if count * tasks > gpus then
        return nil
      end
      asked.per_task, asked.options[option] = count, rest
    else
      -- What the job was submitted with is in the environment: srun's own, smaller number counts, as on whole GPUs.
      asked.cards, asked.options[option] = math.min(asked.cards, count), rest
    end
  end
  return asked
end

-- Takes bindings to GPUs off a step of `tasks` tasks: shards have none. In a gang one card for each task is asked for in
-- another way instead. What to tell the user, if there is something.
local function unbind(get, asked, gpus, tasks)
  -- There is one GPU to bind to, and 26.05 hides it from a step that binds shards as if they were GPUs. 22.05 has no
  -- --tres-bind; later releases keep both options' value there.
  local bind = is_set(get("tres-bind")) and get("tres-bind") or ""
  if bind:find("gpu", 1, true) then
    asked.options["tres-bind"] = "gres/shard:none"
  elseif is_set(get("gpu-bind")) then
    asked.options["gpu-bind"] = "none"
  end
  if gpus <= 1 or tasks <= 1 or asked.per_task then
    return nil
  elseif tasks <= asked.cards and bind:match("gpu:.*single:1$") then
    asked.per_task = 1 -- a card for each task, however it is said
    return nil
  end
  bind = bind:gsub("^gres/gpu:", ""):gsub("^verbose,?", "")
  if bind == "" or bind == "none" then
    return nil
  end
  return "--gpu-bind=" .. bind .. " is not possible in a job that shares its node: each task sees all GPUs of its step"
end

-- What the environment asks for each GPU, the job has in plain CPUs and memory: options of that kind make srun forget the
-- others.
local function plain_amounts(get, wanted, environment, gpus, tasks)
  local cpus, mem = environment("SLURM_CPUS_PER_GPU"), environment("SLURM_MEM_PER_GPU")
  local own_cpus = get("cpus-per-task")
  if is_set(cpus) and (not is_set(own_cpus) or own_cpus == "0") then
    wanted["cpus-per-task"] = gpus == 1 and cpus or string.format("%d", math.max(1, math.floor(cpus * gpus / tasks)))
  end
  if is_set(cpus) and (environment("SLURM_STEP_GRES") or ""):match("^gres:") then
    -- Up to 23.02 srun forgets nothing, but it keeps the lowest 32 bits of this: 0, which is "not given".
    wanted["cpus-per-gpu"] = "4294967296"
  end
  if is_set(mem) then
    wanted.mem = gpus == 1 and mem or "0" -- 0: all that the job has
  end
end

-- What a step of a job with `shards` must ask for instead: {option = value}, or nil if it can stay as it is.
-- Second value: what to tell the user.
function M.step_options(get, shards, environment)
  local gpus = tonumber((environment("GPUSHARE_GANG") or ""):match("^(%d+):%d+:%d+$") or "1")
  local tasks = tonumber(get("ntasks") or "1") or 1
  local asked = step_gpus(get, gpus, tasks)
  if not asked then
    return nil
  end
  local wanted, a_card = asked.options, math.floor(shards / gpus)
  local line = unbind(get, asked, gpus, tasks)
  plain_amounts(get, wanted, environment, gpus, tasks)
  if asked.per_task then
    -- Each task sees its own cards of the gang's.
    local each = string.format("%d", asked.per_task * a_card)
    local rest = is_set(wanted["tres-per-task"]) and wanted["tres-per-task"] .. "," or ""
    wanted["tres-per-task"] = rest .. "gres/shard:" .. each
    wanted["tres-bind"] = "gres/shard:per_task:" .. each
    wanted.gres = ""
  else
    wanted.gres = string.format("shard:%d", asked.cards * a_card)
  end
  return wanted, line
end

-- The three steps, each on the command's options as Slurm gives them.

local function tell(line)
  if line then
    slurm.log_error("%s", "gpushare: " .. line)
  end
end

local function translate_name(options)
  local comment = options.comment
  if type(comment) == "string" then
    local replaced, line = with_token(comment)
    if replaced ~= comment then
      options.comment = replaced
    end
    tell(line)
  end
end

local function set_all(options, wanted)
  for option, value in pairs(wanted or {}) do
    options[option] = value
  end
end

-- sbatch and salloc need none of this: the submit hook does it for jobs.
local function drop_model(options)
  if options.type == "srun" then
    local is_step = os.getenv("SLURM_JOB_ID") ~= nil or is_set(options.jobid)
    set_all(options, M.without_model(function(name)
      return options[name]
    end, is_step))
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
  local wanted, line = M.step_options(function(name)
    local value = options[name]
    -- What the task prolog wrote is nobody's choice.
    if name == "gres" and value == os.getenv("SLURM_STEP_GRES") then
      return nil
    end
    return value
  end, shards, os.getenv)
  set_all(options, wanted)
  tell(line)
end

-- What Slurm calls. A site's own script may have defined these before it runs this file: its functions have the first word.
local their_defaults, their_pre_submit, their_post_submit =
  slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit

function slurm_cli_setup_defaults(...)
  return their_defaults and their_defaults(...) or slurm.SUCCESS
end

function slurm_cli_pre_submit(options, ...)
  local result = their_pre_submit and their_pre_submit(options, ...) or slurm.SUCCESS
  for _, step in ipairs(result == slurm.SUCCESS and ready and { translate_name, drop_model, fit_step } or {}) do
    local ok, why = pcall(step, options)
    if not ok then
      pcall(slurm.log_debug, "%s", "gpushare: " .. tostring(why))
    end
  end
  return result
end

function slurm_cli_post_submit(...)
  return their_post_submit and their_post_submit(...) or slurm.SUCCESS
end

return slurm.SUCCESS, M, site -- the last two for tests
