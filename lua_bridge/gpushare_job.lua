-- What is said of a job: the fields that the hook may see of it, its owner's consent in the comment, our tag.
-- The tables of fields are the whole list: the hook reads a job through `reader` and writes it through `apply`, and both
-- refuse any other; `is_batch` reads one variable of the environment besides. docs/privacy.md explains each entry, and a
-- test drives the hook with a job descriptor that raises on any other name.

local load = ...
local protocol = load("gpushare_protocol")

local M = {}

-- Slurm checks lengths after the hook has run. No text field of a job that it accepts is longer than this (but for
-- the node list, and a job with a longer one than this does not share).
M.LONGEST = protocol.LONGEST

-- What a field holds. Slurm's mark for "unset" depends on the field's width: 65534 is unset in 16 bits and an
-- ordinary number in 32.
local TEXT, NUMBER, BITS16, BITS32, BITS64 = "text", "number", "NO_VAL16", "NO_VAL", "NO_VAL64"

-- Read and written: of a job that is being submitted, or of the change that is being asked for.
M.WRITABLE = {
  admin_comment = TEXT, -- our tag is appended to what is there
  begin_time = NUMBER, -- a lease must not shorten a user's own --begin
  cpus_per_task = BITS16,
  cpus_per_tres = TEXT, -- --cpus-per-gpu
  features = TEXT, -- gpu:v100 becomes the feature v100
  max_nodes = BITS32,
  mem_per_tres = TEXT, -- --mem-per-gpu
  min_cpus = BITS32,
  min_mem_per_node = BITS64,
  min_nodes = BITS32,
  nice = BITS32, -- written only to put the user's own back
  ntasks_per_node = BITS16,
  ntasks_per_tres = BITS16, -- --ntasks-per-gpu
  num_tasks = BITS32,
  pn_min_cpus = BITS16, -- sbatch repeats -c there
  req_nodes = TEXT, -- the user's own -w is restored with the request
  tres_bind = TEXT,
  tres_per_job = TEXT,
  tres_per_node = TEXT,
  tres_per_socket = TEXT,
  tres_per_task = TEXT,
}

-- The same and what is only read.
M.DESC = {
  clusters = TEXT, -- -M submissions are left alone
  comment = TEXT, -- holds the token
  het_job_offset = BITS32, -- heterogeneous jobs are left alone
  immediate = NUMBER,
  min_mem_per_cpu = BITS64,
  ntasks_per_core = BITS16, -- a gang that binds its tasks is left alone
  ntasks_per_socket = BITS16,
  partition = TEXT,
  requeue = BITS16, -- --requeue is the owner's consent to being requeued
  shared = BITS16, -- --exclusive
  sockets_per_node = BITS16,
  time_limit = BITS32, -- a job that was given a card must not become longer before it starts
  tres_freq = TEXT,
  user_id = NUMBER, -- a token counts only for its owner
}
for name, kind in pairs(M.WRITABLE) do
  M.DESC[name] = kind
end

-- Of a job that exists already and is being changed. Its request counts when it moves to another partition.
M.RECORD = {}
for name in ("admin_comment features partition time_limit tres_per_job tres_per_node tres_per_socket tres_per_task"):gmatch("%S+") do
  M.RECORD[name] = M.DESC[name]
end

-- Of a partition. Whether it has nodes that share decides, not its name. The rest is how many CPUs a job may have there.
M.PARTITION = { flag_default = NUMBER, max_cpus_per_node = BITS32, nodes = TEXT, total_cpus = NUMBER, total_nodes = NUMBER }

-- Of the environment: the nice value of the submitting shell. sbatch always sends it and salloc and srun send
-- no environment at all, which makes it the one harmless field by which Slurm lets a hook tell them apart.
M.BATCH_VARIABLE = "SLURM_PRIO_PROCESS"

-- Two functions on `object`: the value of an allowed field (nil where it is unset or empty), and whether a change
-- names the field at all, if only to empty it. Each field is fetched once: Slurm looks a name up in a long list and
-- copies a text on every access.
function M.reader(object, allowed)
  local values, given = {}, {}
  local function read(name)
    if given[name] == nil then
      local kind = allowed[name] or error("field '" .. tostring(name) .. "' is not on the allow-list")
      local value = object[name]
      given[name] = value ~= nil
      -- A 16-bit field may be wider in a later release; no 16-bit number is as large as NO_VAL.
      if value ~= "" and value ~= slurm[kind] and not (kind == BITS16 and value == slurm.NO_VAL) then
        values[name] = value
      end
    end
    return values[name]
  end
  local function is_given(name)
    read(name)
    return given[name]
  end
  return read, is_given
end

-- Whether one of the job's text fields is longer than any that Slurm accepts.
function M.has_long_text(read)
  for name, kind in pairs(M.DESC) do
    local text = kind == TEXT and read(name)
    if text and #text > M.LONGEST then
      return true
    end
  end
  return false
end

-- Whether the job came from sbatch. Where that cannot be told (sbatch --export-file, REST), the answer is no.
function M.is_batch(job_desc)
  local environment = job_desc.environment
  return environment ~= nil and environment[M.BATCH_VARIABLE] ~= nil
end

-- Writes all of `wanted` (field -> value), or none of it, and `for_script` (variable -> value) for the task prolog.
function M.apply(job_desc, wanted, for_script)
  for name, value in pairs(for_script or {}) do
    job_desc.environment[name] = value -- it says nothing to a job that is not placed
  end
  local before = {}
  local ok, why = pcall(function()
    for name, value in pairs(wanted) do
      assert(M.WRITABLE[name], "field '" .. tostring(name) .. "' may not be written")
      before[name] = job_desc[name] or "" -- Slurm clears a text by the empty one; nil is refused
      job_desc[name] = value
    end
  end)
  for name, value in pairs(ok and {} or before) do
    pcall(function()
      job_desc[name] = value
    end)
  end
  if not ok then
    error(why, 0)
  end
end

-- The owner's consent. docs/hook.md has the grammar; slurm_gpushare/protocol/tag.py reads the same one, and a test
-- feeds it, the hook and the filter in the user's commands with the same comments.

-- The two check characters that end a token of these random ones (slurm_gpushare/protocol/tokens.py).
local function check_characters(random)
  local total, letters = 0, protocol.LETTERS_32
  for place = 1, #random do
    total = (total + place * (letters:find(random:sub(place, place), 1, true) - 1)) % 1021
  end
  local first, second = math.floor(total / 32) + 1, total % 32 + 1
  return letters:sub(first, first) .. letters:sub(second, second)
end

-- Whether it is a token: nothing else ever meets SQL. Second value: it looks like one, and was mistyped.
function M.is_token(text)
  text = type(text) == "string" and text or ""
  local random, check = text:match("^gs%-([a-z2-7]+)$"), nil
  if not random then
    random, check = text:match("^gs2%-([a-z2-7]+)([a-z2-7][a-z2-7])$")
  end
  if not random or #random < protocol.TOKEN_MIN or #random > protocol.TOKEN_MAX then
    return false, false
  end
  local wrong = check ~= nil and check ~= check_characters(random)
  return not wrong, wrong
end

-- Whether a word after the token is an option of ours; other words of the comment are somebody else's.
-- slurm_gpushare/protocol/tokens.py takes no such word in a name.
function M.is_option(word)
  local lowered = word:lower()
  local name = lowered:match("^(%a+)$") or lowered:match("^(%a+)[=:]")
  return name ~= nil and protocol.OPTIONS[name] == true
end

-- Our word's own text in the comment, and the options that follow it, with commas between; nil if the comment has none
-- of it, nil and the reason if it has two.
local function our_words(comment)
  local ours, options
  for word in comment:gmatch("%S+") do
    local key, rest = word:match("^(%a+)(.*)$")
    if key and key:lower() == "gpushare" and (rest == "" or rest:match("^[:=]")) then
      if ours then
        return nil, "its comment says gpushare twice"
      end
      ours, options = rest:sub(2):match("^([^,]*)(.*)$")
    elseif ours and M.is_option(word) then
      options = options .. "," .. word
    end
  end
  return ours, options
end

-- What the comment says: {token=..., max=..., requeue=..., cpus_auto=...}. nil if it says nothing of us; nil and the
-- reason if it is not understood.
function M.consent(comment)
  if not comment or not comment:find("[gG][pP][uU][sS][hH][aA][rR][eE]") then -- linear, and copies nothing
    return nil
  elseif #comment > M.LONGEST then
    return nil, "its comment is longer than " .. M.LONGEST .. " characters"
  end
  local token, options = our_words(comment)
  if not token then
    return nil, options
  end
  local is_token, mistyped = M.is_token(token)
  if token == "?" then -- the client filter has said that no token is called so
    return nil
  elseif mistyped then
    return nil, "its token has a wrong letter. 'gpushare token list' shows yours"
  elseif token:sub(1, 2) == "$(" then
    return nil, "no shell reads an #SBATCH line. Put there what 'gpushare token NAME --sbatch' prints"
  elseif not is_token then
    return nil, "that is not a workload token. Make one with: gpushare token NAME"
  end
  local max, requeue, cpus_auto
  for option in options:lower():gmatch("[^,]+") do
    local percent, answer = option:match("^max=(%d%d?%d?)%%?$"), option:match("^requeue=(%a+)$")
    if percent and not max then
      max = tonumber(percent)
    elseif (answer == "yes" or answer == "no") and requeue == nil then
      requeue = answer == "yes"
    elseif option == "cpus=auto" and not cpus_auto then
      cpus_auto = true
    else
      return nil, "only the options max=PERCENT, requeue=yes|no and cpus=auto may follow the token, each once"
    end
  end
  return { token = token, max = max, requeue = requeue, cpus_auto = cpus_auto }
end

-- A file's text; nil, why not, and whether there is none.
function M.text_of(path)
  local file, why, code = io.open(path, "r")
  local text = file and file:read("*a")
  if file then
    file:close()
  end
  return text, why or (path .. ": cannot be read"), code == 2
end

-- Our tag, as slurm_gpushare/protocol/tag.py has it: one word, after whatever else is in AdminComment.

-- The fields that a submitted job may have, in the order in which they are written.
local TAG_FIELDS = { "cluster", "token", "original", "gang", "nodes", "lease", "max_isd_pct", "requeue" }

-- `admin_comment` with a tag of these values {field = text or whole number} in place of the one that it has. `probe`: of a
-- workload that nobody knows.
function M.with_tag(admin_comment, values, probe)
  local parts = { probe and "probe" or nil }
  for _, field in ipairs(TAG_FIELDS) do
    local value = values[field]
    if value ~= nil then
      local text = type(value) == "number" and string.format("%d", value) or value
      parts[#parts + 1] = protocol.LETTERS[field] .. "=" .. text
    end
  end
  local kept = (" " .. (admin_comment or "")):gsub("%s" .. protocol.PREFIX .. "%S*", ""):gsub("^%s+", "")
  return (kept == "" and "" or kept .. " ") .. protocol.PREFIX .. table.concat(parts, ";")
end

-- What is in the tag of an AdminComment, without the prefix; nil if it has none.
function M.tag(admin_comment)
  return (" " .. (admin_comment or "")):match("%s" .. protocol.PREFIX .. "(%S*)")
end

-- A field of such a text; nil if it is not there.
function M.tag_field(tag, field)
  return (";" .. tag):match(";" .. protocol.LETTERS[field] .. "=([^;]*)")
end

return M
