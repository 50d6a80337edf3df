-- Written by scripts/make_reference.py from slurm_gpushare/protocol/: edit there, then run 'make reference'.

local M = {}

M.PREFIX = "GS1:"
M.LONGEST = 1024
M.TOKEN_MIN = 16
M.TOKEN_MAX = 32
M.LETTERS_32 = "abcdefghijklmnopqrstuvwxyz234567"

M.KEYS = {
  partitions = { attribute = "partitions", kind = "names", default = "" },
  shardspergpu = { attribute = "shards_per_gpu", kind = "whole", default = "2", bounds = { "2", "64" } },
  gpumodel = { attribute = "gpu_models", kind = "models", default = "v100" },
  hookfile = { attribute = "hook_file", kind = "path", default = "/var/lib/gpushare/hook.sqlite" },
  leaseseconds = { attribute = "lease_s", kind = "whole", default = "30", bounds = { "1", "600" } },
  policy = { attribute = "policy", kind = "choice", default = "gpushare", bounds = { "gpushare", "paper", "fcfs", "random", "shadow", "off" } },
  sharegangs = { attribute = "share_gangs", kind = "choice", default = "no", bounds = { "yes", "no" } },
  mps = { attribute = "mps", kind = "choice", default = "off", bounds = { "off", "user", "all" } },
  rawshards = { attribute = "raw_shards", kind = "choice", default = "deny", bounds = { "deny", "allow" } },
  slurmversion = { attribute = "slurm_version", kind = "version", default = "" },
  gpuspernode = { attribute = "gpus_per_node", kind = "whole", default = "4", bounds = { "1", "64" } },
  defcpupergpu = { attribute = "def_cpu_per_gpu", kind = "per_partition", default = "" },
  defmempergpu = { attribute = "def_mem_per_gpu_mib", kind = "per_partition", default = "" },
  heartbeatseconds = { attribute = "heartbeat_s", kind = "whole", default = "60", bounds = { "5", "3600" } },
}

M.PLACES = {
  partitions = "site",
  shardspergpu = "site",
  gpumodel = "site",
  storeurl = "site",
  hookfile = "site",
  spooldir = "site",
  recordsto = "site",
  publicdir = "site",
  dcgmjobmappingdir = "site",
  probeseconds = "site",
  backend = "site",
  leaseseconds = "site",
  tickseconds = "site",
  epiloghold = "site",
  keepdays = "site",
  policy = "site",
  objective = "site",
  shareacross = "site",
  sharegangs = "site",
  residentbudget = "site",
  guestcap = "site",
  extendtimelimit = "site",
  frameworkmemory = "site",
  mps = "site",
  onslowdown = "site",
  rawshards = "site",
  slurmversion = "generated",
  gpuspernode = "generated",
  defcpupergpu = "generated",
  defmempergpu = "generated",
  slurmuser = "generated",
  nodeusers = "generated",
  mungesocket = "generated",
  statedir = "constant",
  sampleseconds = "constant",
  interimseconds = "constant",
  heartbeatseconds = "constant",
  memoryheadroom = "constant",
  pausemost = "constant",
}

M.SINCE = {
  explains_refusals = 230200,
  gpu_becomes_shard = 230206,
  keeps_small_and_capital = 241100,
  writes_gres_with_slash = 231100,
  counts_shards_per_gpu = 231102,
  keeps_whole_gpus_apart = 231105,
}

M.LETTERS = {
  cluster = "c",
  token = "t",
  original = "o",
  gang = "k",
  nodes = "w",
  lease = "l",
  max_isd_pct = "m",
  placed = "g",
  nice = "n",
  successor = "h",
  given_min = "x",
  paused = "p",
  paused_before_s = "q",
  stopped_before_s = "s",
  requeue = "r",
}

M.OPTIONS = {
  max = true,
  requeue = true,
  cpus = true,
}

return M
