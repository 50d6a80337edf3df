-- slurm-gpushare in the user's own sbatch, salloc and srun (cli_filter/lua). `gpushare configure` writes this file with
-- all that it needs in it. As it is here it loads its modules from beside it.

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

local ready, gpushare = pcall(load, "gpushare_cli")

-- A site's own script may have defined these before it runs this file: its functions have the first word.
local their_defaults, their_pre_submit, their_post_submit =
  slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit

function slurm_cli_setup_defaults(...)
  return their_defaults and their_defaults(...) or slurm.SUCCESS
end

function slurm_cli_pre_submit(...)
  local result = their_pre_submit and their_pre_submit(...) or slurm.SUCCESS
  if result ~= slurm.SUCCESS or not ready then
    return result
  end
  return gpushare.pre_submit(...)
end

function slurm_cli_post_submit(...)
  return their_post_submit and their_post_submit(...) or slurm.SUCCESS
end

return slurm.SUCCESS
