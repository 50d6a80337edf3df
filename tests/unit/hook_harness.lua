-- Drives the submit hook outside slurmctld: lua hook_harness.lua LUA_BRIDGE_DIR CASES.lua
-- The cases file returns a function(run) that is called with the tools below; it prints what the test wants to see.

local bridge, cases = arg[1], arg[2]

local function as_c_number(value) -- Slurm pushes every number as a C double
  return value * 1.0
end

slurm = {
  SUCCESS = as_c_number(0),
  ERROR = as_c_number(-1),
  ESLURM_ACCESS_DENIED = as_c_number(2002),
  NO_VAL = as_c_number(4294967294),
  NO_VAL16 = as_c_number(65534),
  NO_VAL64 = 18446744073709551614.0,
  NO_VAL8 = as_c_number(254),
}

local said, logged = {}, {}
function slurm.log_user(format, ...)
  said[#said + 1] = string.format(format, ...)
end
function slurm.log_error(format, ...)
  logged[#logged + 1] = string.format(format, ...)
end
slurm.log_debug = slurm.log_error

-- Numbers that sbatch leaves unset; strings that it leaves unset are nil.
local NUMBERS = {
  begin_time = 0, cpus_per_task = 65534, het_job_offset = 4294967294, immediate = 0, max_nodes = 4294967294, min_cpus = 1,
  min_nodes = 4294967294, nice = 4294967294, ntasks_per_core = 65534, ntasks_per_node = 65534, ntasks_per_socket = 65534,
  ntasks_per_tres = 65534, num_tasks = 4294967294, pn_min_cpus = 65534,
  requeue = 65534, shared = 65534,
  sockets_per_node = 65534, time_limit = 4294967294, user_id = 1000,
}
local MAYBE_NUMBERS = { min_mem_per_cpu = true, min_mem_per_node = true } -- nil when unset
local STRINGS = {}
for name in ([[admin_comment clusters comment cpus_per_tres features mem_per_tres partition req_nodes tres_bind
  tres_freq tres_per_job tres_per_node tres_per_socket tres_per_task]]):gmatch("%S+") do
  STRINGS[name] = true
end

-- What configure writes into the scripts is in `site`; gpushare.conf is enough for most tests.
local _, load, site = dofile(bridge .. "/job_submit.lua")
local _, client, clients_site = dofile(bridge .. "/cli_filter.lua")
local run = { fetched = {}, said = said, logged = logged, site = site, load = load, client = client, clients_site = clients_site }

-- A job descriptor like slurmctld's: an empty table whose metatable answers, refuses nil, and here also raises on any
-- field outside of the hook's allow-list. `fail_on` makes writing that field raise.
function run.descriptor(given, batch, fail_on)
  local values = {}
  for name, value in pairs(NUMBERS) do
    values[name] = as_c_number(value)
  end
  for name, value in pairs(given) do
    values[name] = type(value) == "number" and as_c_number(value) or value
  end
  local environment = setmetatable({}, {
    __index = function(_, name)
      assert(name == "SLURM_PRIO_PROCESS", "read the environment variable " .. name)
      return batch and "0" or nil
    end,
    __newindex = function(_, name, value)
      assert(name == "GPUSHARE_GANG" or name == "GPUSHARE_MEMORY", "wrote the environment variable " .. name)
      values["environment." .. name] = value
    end,
  })
  local proxy = setmetatable({}, {
    __index = function(_, name)
      if name == "environment" then
        return environment
      end
      assert(NUMBERS[name] or MAYBE_NUMBERS[name] or STRINGS[name], "read the field " .. tostring(name))
      run.fetched[#run.fetched + 1] = name
      return values[name]
    end,
    __newindex = function(_, name, value)
      assert(name ~= fail_on, "cannot write " .. name)
      if STRINGS[name] then
        assert(type(value) == "string", name .. ": string expected, got " .. type(value))
        values[name] = value ~= "" and value or nil
      else
        assert(NUMBERS[name] or MAYBE_NUMBERS[name], "wrote the field " .. tostring(name))
        assert(type(value) == "number", name .. ": number expected, got " .. type(value))
        assert(value >= 0 and value % 1 == 0, name .. ": not a whole number")
        values[name] = value
      end
    end,
  })
  return proxy, values
end

-- `twin` has nodes of a partition that shares, `other` has none of them.
run.partitions = {
  gpu = { flag_default = 1, nodes = "gpu[0-1],big0", max_cpus_per_node = 4294967295, total_cpus = 98, total_nodes = 3 },
  gpu2 = { flag_default = 0, nodes = "gpu[2-3]", max_cpus_per_node = 6, total_cpus = 64, total_nodes = 2 },
  twin = { flag_default = 0, nodes = "cpu[000-120],gpu[1,7]" },
  other = { flag_default = 0, nodes = "cpu[000-120],gpu7" },
}
local PARTITION = { flag_default = true, max_cpus_per_node = true, nodes = true, total_cpus = true, total_nodes = true }
for name, values in pairs(run.partitions) do
  run.partitions[name] = setmetatable({}, {
    __index = function(_, field)
      assert(PARTITION[field], "read the partition's " .. field)
      local value = values[field]
      return type(value) == "number" and as_c_number(value) or value
    end,
  })
end

local function hex(value)
  return (tostring(value):gsub(".", function(char)
    return string.format("%02x", char:byte())
  end))
end

local function plain(value)
  return type(value) == "number" and string.format("%.0f", value) or value
end

-- Submits one job and prints: rc, each field that differs from what the user wrote, what was said and logged.
function run.submit(given, options)
  options = options or {}
  local desc, values = run.descriptor(given, options.batch ~= false, options.fail_on)
  local _, before = run.descriptor(given)
  local result = slurm_job_submit(desc, run.partitions, options.uid or 1000)
  run.report(result, before, values)
end

function run.modify(given, record, options)
  options = options or {}
  given.min_cpus = given.min_cpus or 4294967294 -- scontrol, unlike sbatch, leaves it unset
  local desc, values = run.descriptor(given, false)
  local _, before = run.descriptor(given)
  local job = setmetatable({}, {
    __index = function(_, name)
      assert(load("gpushare_job").RECORD[name], "read the job's " .. name)
      return record[name]
    end,
  })
  local result = slurm_job_modify(desc, job, run.partitions, options.uid or 1000)
  run.report(result, before, values)
end

function run.report(result, before, after)
  print("rc " .. hex(plain(result)))
  for _, pair in ipairs({ { before, after }, { after, before } }) do
    for name in pairs(pair[1]) do
      if before[name] ~= after[name] and not (pair[1] == after and before[name] ~= nil) then
        print("field " .. name .. " " .. hex(after[name] == nil and "" or plain(after[name])))
      end
    end
  end
  while #said > 0 do
    print("said " .. hex(table.remove(said, 1)))
  end
  while #logged > 0 do
    print("logged " .. hex(table.remove(logged, 1)))
  end
  print("end")
end

dofile(cases)(run)
