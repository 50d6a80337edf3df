# Written by scripts/make_reference.py from slurm_gpushare/protocol/: edit there, then run 'make reference'.
# shellcheck shell=bash disable=SC2034

# Key -> place, attribute, kind of value, default; "-" where no script of a node needs it.
declare -gA GS_KEYS=(
  [partitions]='site partitions names '
  [shardspergpu]='site - - '
  [gpumodel]='site - - '
  [storeurl]='site - - '
  [hookfile]='site - - '
  [spooldir]='site spool_dir path /var/spool/gpushare'
  [recordsto]='site - - '
  [publicdir]='site - - '
  [dcgmjobmappingdir]='site dcgm_job_mapping_dir optional_path '
  [probeseconds]='site - - '
  [backend]='site - - '
  [leaseseconds]='site - - '
  [tickseconds]='site - - '
  [epiloghold]='site epilog_hold_s number:0:2 1'
  [keepdays]='site - - '
  [policy]='site - - '
  [objective]='site - - '
  [shareacross]='site - - '
  [sharegangs]='site - - '
  [residentbudget]='site - - '
  [guestcap]='site - - '
  [extendtimelimit]='site - - '
  [frameworkmemory]='site framework_memory choice:grow:leave grow'
  [onslowdown]='site - - '
  [rawshards]='site - - '
  [slurmversion]='generated - - '
  [gpuspernode]='generated - - '
  [defcpupergpu]='generated - - '
  [defmempergpu]='generated - - '
  [slurmuser]='generated slurm_user text slurm'
  [nodeusers]='generated - - '
  [mungesocket]='generated - - '
  [statedir]='constant state_dir path /run/gpushare'
  [sampleseconds]='constant - - '
  [interimseconds]='constant - - '
  [heartbeatseconds]='constant - - '
  [memoryheadroom]='constant - - '
  [pausemost]='constant - - '
)
GS_EXPLAINS_REFUSALS=230200
GS_GPU_BECOMES_SHARD=230206
GS_WRITES_GRES_WITH_SLASH=231100
GS_COUNTS_SHARDS_PER_GPU=231102
GS_KEEPS_WHOLE_GPUS_APART=231105
