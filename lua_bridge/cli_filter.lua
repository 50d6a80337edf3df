-- slurm-gpushare in the user's own sbatch, salloc and srun (cli_filter/lua), written and loaded as job_submit.lua is.
-- Three things that only the client can do: turn a workload's name into its token, so that the name never leaves the
-- user's side; make srun understand gpu:MODEL where every GPU index has a type of its own; and make srun work inside a
-- job that has shards. Whatever breaks in here, the command goes on as the user wrote it.

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
  local found, found_token
  for line in (jobs.text_of(tokens_path()) or ""):gmatch("[^\n]+") do
    local token, rest = line:match("^(%S+) (.*)$")
    local name = trimmed(rest or "")
    if jobs.is_token(token) and #name > #(found or "") and begins_with(text, name) then
      found, found_token = name, token
    end
  end
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
-- A name without a token is taken out: it must not reach the controller. Mistyped tokens and $(...) are the hook's to tell.
local function with_token(comment)
  local first, last = (" " .. comment:lower()):find("%sgpushare[:=]") -- any case, as the hook reads it
  if not first then
    return comment
  end
  local before, tail = comment:sub(1, first - 1), comment:sub(last)
  local length = name_length(tail)
  local text = tail:sub(1, length)
  local start = text:match("^%S+")
  local is_token, mistyped = jobs.is_token(start or "")
  if not start or is_token or mistyped then
    return comment
  elseif start:sub(1, 2) == "$(" then
    return before .. "gpushare:$(" .. tail:sub(length + 1)
  end
  local name, token = find_name(text)
  if name then
    return before .. "gpushare:" .. token .. tail:sub(#name + 1)
  end
  local line = "no token is called '%s': make one with 'gpushare token NAME'. The job is submitted without sharing"
  return before .. "gpushare:?" .. tail:sub(length + 1), line:format(trimmed(text):sub(1, 60))
end

-- What srun asks of GPUs.

-- A function for the value of an option, as the user or the environment says it: nil where neither does, or where only our
-- task prolog did.
function M.reader(options)
  return function(name)
    local value = options[name]
    if value == "" or value == "unset" or (name == "gres" and value == os.getenv("SLURM_STEP_GRES")) then
      return nil
    end
    return value
  end
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
  local asked, name = {}, not is_step and "constraint" or nil
  for _, option in ipairs(GPU_OPTIONS) do
    asked[option] = get(option) and items_of(option, get(option))
  end
  local wanted = request.without_model(asked, site.models, name, name and get(name))
  for option, text in pairs(wanted or {}) do
    if asked[option] and not LISTS[option] then
      wanted[option] = text:match("^gpu:(%d+)$")
    end
  end
  return wanted or nil
end

-- Options beside which srun --gpus=0 hides no card on whole GPUs either.
local KEEP_CARDS = { "gpus-per-socket", "gpus-per-task", "tres-per-task", "mem-per-gpu" }

-- Whether a step wants to see no card: srun --gpus=0.
local function hides_cards(get)
  local hides = get("gpus") == "0" and (get("cpus-per-gpu") or "0") == "0"
  for _, option in ipairs(KEEP_CARDS) do
    local value = get(option)
    hides = hides and (not value or (LISTS[option] and not request.mentions(value)))
  end
  return hides
end

-- How many of its job's `gpus` a step asks for, and for each of its `tasks` if it says so, with the options that say it
-- emptied: {cards, per_task, options}. nil if it has to stay as it is.
local function step_gpus(get, gpus, tasks, is_old)
  if hides_cards(get) then
    return { cards = 0, options = { ["gpus-per-node"] = get("gpus-per-node") and "" } }
  end
  local asked = { cards = gpus, options = {} }
  for _, option in ipairs(GPU_OPTIONS) do
    local value, count, rest = get(option), nil, nil
    if value then
      count, rest = gpus_in(option, value)
    end
    -- Tasks may share a card where Slurm is told so and does not count the job's GPUs in all. 22.05 kills them.
    local shared = get("overcommit") and get("gpus-per-node") and not is_old
    local for_tasks = option:match("per%-task$") and tasks > 1 and not shared
    if value and option == "gres" and not count then
      return nil -- the step's own choice: shards, none, or something else
    elseif count and (for_tasks and count * tasks or count) > gpus then
      return nil -- would fail on whole GPUs too
    elseif count and for_tasks and count > 0 then
      asked.per_task, asked.options[option] = count, rest
    elseif count then
      -- What the job was submitted with is in the environment: srun's own, smaller number counts, as on whole GPUs.
      asked.cards, asked.options[option] = count > 0 and math.min(asked.cards, count) or asked.cards, rest
    end
  end
  return asked
end

-- Takes bindings to GPUs off a step of `tasks` tasks: shards have none. In a gang one card for each task is asked for in
-- another way instead. What to tell the user, if there is something.
local function unbind(get, asked, gpus, tasks)
  -- There is one GPU to bind to, and 26.05 hides it from a step that binds shards as if they were GPUs. 22.05 has no
  -- --tres-bind; later releases keep both options' value there.
  local bind = get("tres-bind") or ""
  if bind:find("gpu", 1, true) then
    asked.options["tres-bind"] = "gres/shard:none"
  elseif get("gpu-bind") then
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

local NO_CPUS_PER_GPU = "--cpus-per-gpu is not possible in a step of a job that shares its GPU: write -c %d instead"

-- What is asked for each GPU, of CPUs and memory, as a plain request: options of that kind fail with shards. Of those that
-- are in the job's environment srun lets go where it is given others. Of those on its command line it does not: the job's
-- whole memory is asked for, and CPUs for each GPU cannot be, for the reason that is returned.
local function plain_amounts(get, wanted, environment, gpus, tasks, is_old, is_written)
  local function of_the_job(option, variable)
    return get(option) == environment(variable) and not is_written("--" .. option:sub(1, -3))
  end
  local cpus, mem = get("cpus-per-gpu") or "0", get("mem-per-gpu")
  if cpus ~= "0" then
    local per_task = math.max(1, math.floor((tonumber(cpus) or 1) * gpus / tasks))
    if is_old then
      wanted["cpus-per-gpu"] = "4294967296" -- srun keeps the lowest 32 bits of this: 0, which is "not given"
    elseif not of_the_job("cpus-per-gpu", "SLURM_CPUS_PER_GPU") then
      return NO_CPUS_PER_GPU:format(per_task)
    end
    if (get("cpus-per-task") or "0") == "0" then
      wanted["cpus-per-task"] = string.format("%d", per_task)
    end
  end
  if mem and of_the_job("mem-per-gpu", "SLURM_MEM_PER_GPU") then
    wanted.mem = gpus == 1 and mem or "0" -- 0: all that the job has
  elseif mem then
    wanted["mem-per-gpu"] = "0"
  end
  return nil
end

-- What a step of a job with `shards` must ask for instead: {option = value}, or nil if it can stay as it is.
-- Second value: what to tell the user; third: why the step cannot be. `is_written`: whether a word of srun's command line
-- begins so.
function M.step_options(get, shards, environment, is_written)
  local gpus = tonumber((environment("GPUSHARE_GANG") or ""):match("^(%d+):%d+:%d+$") or "1")
  local tasks = tonumber(get("ntasks") or "1") or 1
  local is_old = (environment("SLURM_STEP_GRES") or ""):match("^gres:") ~= nil -- up to 23.02
  local asked = step_gpus(get, gpus, tasks, is_old)
  if not asked then
    return nil
  end
  local wanted, a_card = asked.options, math.floor(shards / gpus)
  local line = unbind(get, asked, gpus, tasks)
  local refusal = plain_amounts(get, wanted, environment, gpus, tasks, is_old, is_written)
  if asked.per_task then
    -- Each task sees its own cards of the gang's.
    local each = string.format("%d", asked.per_task * a_card)
    local rest = (wanted["tres-per-task"] or "") ~= "" and wanted["tres-per-task"] .. "," or ""
    wanted["tres-per-task"] = rest .. "gres/shard:" .. each
    wanted["tres-bind"] = "gres/shard:per_task:" .. each
    wanted.gres = ""
  else
    wanted.gres = asked.cards > 0 and string.format("shard:%d", asked.cards * a_card) or "none"
  end
  return wanted, line, refusal
end

-- The three steps, each on the command's options as Slurm gives them. What they return ends the command.

local function tell(line)
  if line then
    slurm.log_error("%s", "gpushare: " .. line)
  end
end

local function translate_name(options)
  if type(options.comment) == "string" then
    local replaced, line = with_token(options.comment)
    options.comment = replaced
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
    local get = M.reader(options)
    set_all(options, M.without_model(get, os.getenv("SLURM_JOB_ID") ~= nil or get("jobid") ~= nil))
  end
end

-- Whether a word of this command begins so: Slurm does not tell what the command line says and what the environment.
local function is_written(beginning)
  local words = "\0" .. (jobs.text_of("/proc/self/cmdline") or "")
  return words:find("\0" .. beginning, 1, true) ~= nil
end

local function fit_step(options)
  local job = os.getenv("SLURM_JOB_ID")
  local shards = (os.getenv("SLURM_SHARDS_ON_NODE") or ""):match("^%d+$")
  if options.type ~= "srun" or not job or not shards then
    return nil
  end
  local target = options.jobid
  if target and target ~= job and target:match("^%d+$") then
    return nil -- a step of some other job
  end
  local wanted, line, refusal = M.step_options(M.reader(options), shards, os.getenv, is_written)
  tell(refusal or line)
  if refusal then
    return slurm.ERROR
  end
  set_all(options, wanted)
  return nil
end

-- What Slurm calls. A site's own script may have defined these before it runs this file: its functions have the first word.
local their_pre_submit = slurm_cli_pre_submit

function slurm_cli_pre_submit(options, ...)
  local result = their_pre_submit and their_pre_submit(options, ...) or slurm.SUCCESS
  for _, step in ipairs(result == slurm.SUCCESS and ready and { translate_name, drop_model, fit_step } or {}) do
    local ok, answer = pcall(step, options)
    if ok and answer then
      return answer
    elseif not ok then
      pcall(slurm.log_debug, "%s", "gpushare: " .. tostring(answer))
    end
  end
  return result
end

-- Slurm loads no script without these two.
local function nothing()
  return slurm.SUCCESS
end

slurm_cli_setup_defaults = slurm_cli_setup_defaults or nothing
slurm_cli_post_submit = slurm_cli_post_submit or nothing

return slurm.SUCCESS, M, site -- the last two for tests
