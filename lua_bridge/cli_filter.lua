-- For a site without a cli_filter.lua of its own; else call gpushare.pre_submit from yours.
local ready, gpushare = pcall(dofile, (debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/") .. "gpushare_cli.lua")
function slurm_cli_setup_defaults(options, early) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, offset) return ready and gpushare.pre_submit(options, offset) or slurm.SUCCESS end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
