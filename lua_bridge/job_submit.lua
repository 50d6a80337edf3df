-- slurm-gpushare in slurmctld (job_submit/lua). `gpushare configure` writes this file with all that it needs in it: the
-- modules and the site's GPU models. It then works whatever happens to our other files; without gpushare.conf no job
-- shares, and everybody's gpu:MODEL is still understood. As it is here it loads its modules from beside it.

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

local ready, gpushare = pcall(load, "gpushare")
if not ready then
  slurm.log_error("%s", "gpushare: not loaded: " .. tostring(gpushare))
end

-- A site's own script may have defined these before it runs this file: its functions have the first word.
local their_submit, their_modify = slurm_job_submit, slurm_job_modify

local function first_theirs(theirs, ours, ...)
  local result = theirs and theirs(...) or slurm.SUCCESS
  if result ~= slurm.SUCCESS or not ready then
    return result
  end
  return gpushare[ours](...)
end

function slurm_job_submit(...)
  return first_theirs(their_submit, "job_submit", ...)
end

function slurm_job_modify(...)
  return first_theirs(their_modify, "job_modify", ...)
end

return slurm.SUCCESS
