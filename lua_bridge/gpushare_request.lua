-- What a job asks for, in any of Slurm's six ways, and the GPU models and constraints in it.
-- Pure functions: strings and numbers in, tables out.

local load = ...
local LONGEST = load("gpushare_protocol").LONGEST -- longer fields are not taken apart

local M = {}

-- The four fields a GPU request may be in; --ntasks-per-gpu is the fifth way, --tres-per-task the sixth.
M.FIELDS = { "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }

-- Whether the text names GPUs or shards anywhere, in whatever form and case. Linear, and copies nothing.
function M.mentions_shards(text)
  return text:find("[sS][hH][aA][rR][dD]") ~= nil
end

function M.mentions(text)
  return text:find("[gG][pP][uU]") ~= nil or M.mentions_shards(text)
end

-- The last word of a request as a count; nil if it is none. Nobody has a billion GPUs, and longer numbers overflow.
local function count_of(word)
  return #word <= 9 and word:match("^%d+$") and tonumber(word) or nil
end

-- Whether Slurm may read something else out of an item than this file does. It looks for "gres" anywhere in the text,
-- so that "xgres:shard:1" is a shard.
local function is_deceptive(body, name)
  if not M.mentions(body) then
    return false
  elseif body:lower():find("gres", 1, true) then
    return true
  elseif name == "gpu" or name == "shard" then
    return false
  end
  local lowered = name:lower()
  return lowered == "gpu" or lowered == "shard" or not name:match("^[%w_]+$") or M.mentions(body:sub(#name + 1))
end

local NONE = {} -- nobody adds to a list that `parse` has made

-- "gres/gpu:v100:2,nic" -> {{text=..., prefix="gres/", name="gpu", type="v100", count=2}, ...}.
-- An item that is not understood is marked as odd.
function M.parse(text)
  if not text or #text > LONGEST then
    return NONE
  end
  local items = {}
  for item in text:gmatch("[^,]+") do
    local prefix = item:match("^gres[:/]") or ""
    local body = item:sub(#prefix + 1)
    local words = {}
    for word in (body .. ":"):gmatch("(.-)[:=]") do
      words[#words + 1] = word
    end
    local parsed = { text = item, prefix = prefix, name = words[1]:lower() }
    local last = words[#words]
    if is_deceptive(body, words[1]) then
      parsed.odd = true
    elseif #words == 1 then
      parsed.count = 1
    elseif #words == 2 and count_of(last) then
      parsed.count = count_of(last)
    elseif #words == 2 and last:match("^%a") then
      parsed.type, parsed.count = last, 1
    elseif #words == 3 and count_of(last) and words[2] ~= "" then
      parsed.type, parsed.count = words[2], count_of(last)
    else
      parsed.odd = true -- a count with a unit, or a form of a later release
    end
    items[#items + 1] = parsed
  end
  return items
end

-- The job's requests, each field parsed once: {field = items}.
function M.of(read)
  local asked = {}
  for _, field in ipairs(M.FIELDS) do
    asked[field] = M.parse(read(field))
  end
  return asked
end

-- Whether the job may ask for GPUs or shards at all: a quick look, before anything is taken apart. And whether a field that
-- names them is too long for that: such a job is refused.
function M.speaks_of_gpus(read)
  local speaks, too_long = (read("ntasks_per_tres") or 0) > 0, false
  for _, field in ipairs(M.FIELDS) do
    local text = read(field)
    if text and M.mentions(text) then
      speaks, too_long = true, too_long or #text > LONGEST
    end
  end
  return speaks, too_long
end

-- How many tasks the job has, and whether it says so itself.
function M.tasks(read)
  local tasks, per_node = read("num_tasks") or 0, read("ntasks_per_node") or 0
  if tasks > 0 then
    return tasks, true
  end
  return math.max(1, per_node), per_node > 0
end

-- What is asked for: {gpus, shards, unclear = either in a way that this file does not understand, part = shards that are
-- less than a card}, each true or false. All shards of a card are a whole GPU, as this hook writes it itself on old releases.
function M.kinds(asked, shards_per_gpu)
  local found = { gpus = false, shards = false, unclear = false, part = false }
  for _, items in pairs(asked) do
    for _, item in ipairs(items) do
      local unclear = item.odd and M.mentions(item.text) or false
      local odd_shards = unclear and M.mentions_shards(item.text)
      found.unclear = found.unclear or unclear
      found.gpus = found.gpus or unclear or item.name == "gpu"
      found.shards = found.shards or odd_shards or item.name == "shard"
      found.part = found.part or odd_shards or (item.name == "shard" and item.count ~= shards_per_gpu)
    end
  end
  return found
end

-- `features` and `model`, or nil where the expression cannot be extended without changing what it means.
-- Slurm reads "&" and "|" from left to right and takes parentheses one deep, so an alternative is put in them.
function M.with_feature(features, model)
  if not features or features == "" then
    return model
  elseif #features > LONGEST then
    return features .. "&" .. model -- Slurm will refuse it, whatever it means
  elseif features:find("[%[%]]") then
    return features:match("^[^%[%]|*]*%[[^%[%]*]*%]$") and model .. "&" .. features
  end
  local top = features:gsub("%([^()]*%)", "")
  local nested, alternatives = features ~= top, top:find("|", 1, true)
  if features:find("*", 1, true) or top:find("[()]") or (nested and alternatives) then
    return nil
  elseif alternatives then
    return "(" .. features .. ")&" .. model
  elseif not nested and ("&" .. features:gsub(",", "&") .. "&"):find("&" .. model .. "&", 1, true) then
    return features
  end
  return features .. "&" .. model
end

-- The one of `models` that a constraint asks for, nil if it leaves the choice open.
function M.named_model(features, models)
  if not features or #features > LONGEST or not features:match("^[%w_.&,-]+$") then
    return nil
  end
  for name in features:gmatch("[^&,]+") do
    if models[name] then
      return name
    end
  end
  return nil
end

-- gpu:MODEL:N -> gpu:N in all of `asked` ({field = items}), since with one type an index no GPU has the type MODEL. The
-- model goes into the constraint, if the caller has one: the field `name`, which says `features` now.
-- The changes as {field = value}; nil if there is nothing to do; false if it cannot be done.
function M.without_model(asked, models, name, features)
  local wanted, model = {}, nil
  for field, items in pairs(asked) do
    local texts, found = {}, false
    for i, item in ipairs(items) do
      texts[i] = item.text
      if item.name == "gpu" and item.type and models[item.type] and not item.odd then
        if found or (model and model ~= item.type) then
          return false -- two models in one job, or one twice in a field: both would become the same request
        end
        found, model = true, item.type
        local separator = item.text:match("([:=])%d+$") or ":"
        texts[i] = string.format("%s%s%s%d", item.prefix, item.name, separator, item.count)
      end
    end
    wanted[field] = found and table.concat(texts, ",") or nil
  end
  if not model then
    return nil
  elseif name then
    local extended = M.with_feature(features, model)
    if not extended then
      return false
    end
    wanted[name] = extended ~= features and extended or nil
  end
  return wanted
end

-- From 24.05 sbatch repeats -c N as "cpu=N" in tres_per_task: not a resource of its own. The other items, and its text.
function M.without_cpus(items)
  local others, cpus = {}, {}
  for _, item in ipairs(items) do
    if item.name == "cpu" then
      cpus[#cpus + 1] = item.text
    else
      others[#others + 1] = item
    end
  end
  return others, table.concat(cpus, ",")
end

return M
