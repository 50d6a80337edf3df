# shellcheck shell=bash
# What prolog, epilog and task prolog have in common: gpushare.conf, and the node's state directory.
# Sourced, never run. Nothing here may fail the caller, take long, or ask Slurm anything: slurmd waits for us,
# and a prolog that fails drains the node.
# The state directory's layout is described in slurm_gpushare/telemetry/node_state.py.

# Slurm sets no search path for a prolog; one that is set (a test, a wrapper) comes first.
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

gs_conf_file() {
  if [[ -n ${GPUSHARE_CONF:-} ]]; then
    gs_conf=$GPUSHARE_CONF
  elif [[ -n ${SLURM_CONF:-} ]]; then
    gs_conf=${SLURM_CONF%/*}/gpushare.conf
  else
    gs_conf=/etc/slurm/gpushare.conf
  fi
}

# Sets gs_partitions, gs_state_dir, gs_dcgm_dir from gpushare.conf; false if there is none to read.
gs_read_conf() {
  local line key value
  gs_conf_file
  gs_partitions='' gs_state_dir=/run/gpushare gs_dcgm_dir=''
  [[ -r $gs_conf ]] || return 1
  while IFS= read -r line || [[ -n $line ]]; do
    line=${line%%#*}
    [[ $line == *=* ]] || continue
    key=${line%%=*} value=${line#*=}
    key=${key//[[:space:]]/}
    value=${value#"${value%%[![:space:]]*}"}
    value=${value%"${value##*[![:space:]]}"}
    case ${key,,} in
      partitions) gs_partitions=${value//[[:space:]]/} ;;
      statedir) gs_state_dir=$value ;;
      dcgmjobmappingdir) gs_dcgm_dir=$value ;;
    esac
  done <"$gs_conf"
}

# Sets gs_job, gs_node, gs_node_dir from Slurm's environment; false if this is no job's prolog or epilog.
gs_read_job() {
  gs_job=${SLURM_JOB_ID:-}
  gs_node=${SLURMD_NODENAME:-$(hostname -s)}
  [[ $gs_job =~ ^[0-9]{1,10}$ && $gs_node =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || return 1
  gs_node_dir=$gs_state_dir/nodes/$gs_node
}

# Sets gs_gpus to the job's GPU indices: SLURM_JOB_GPUS is "0,2" or "0-3"; CUDA_VISIBLE_DEVICES may be UUIDs.
gs_read_gpus() {
  local item first last
  gs_gpus=()
  for item in ${SLURM_JOB_GPUS//,/ }; do
    [[ $item =~ ^[0-9]{1,3}(-[0-9]{1,3})?$ ]] || continue
    first=${item%-*} last=${item#*-}
    for ((; 10#$first <= 10#$last; first++)); do gs_gpus+=("$((10#$first))"); done
  done
  ((${#gs_gpus[@]}))
}

# Sets gs_stat to the fields of process $1's stat from the third on; false if there is no such process.
gs_read_stat() {
  local stat=''
  [[ $1 =~ ^[0-9]+$ && -r /proc/$1/stat ]] || return 1
  IFS= read -r -d '' stat <"/proc/$1/stat" # to the end of the file, which "read" calls a failure
  read -ra gs_stat <<<"${stat##*) }" # the name in parentheses may hold anything
}
GS_SESSION=3 GS_START=19

# Whether process $1 is still the one that started at $2.
gs_is_process() {
  gs_read_stat "$1" && [[ ${gs_stat[GS_START]} == "$2" ]]
}

# Adds ($1 = add) or removes the job's line in DCGM's job mapping file of each of its GPUs, leaving all others.
gs_dcgm() {
  local gpu file line kept
  [[ -n $gs_dcgm_dir ]] && mkdir -p "$gs_dcgm_dir" || return 0
  {
    flock -w 0.2 9 || return 0
    for gpu in "${gs_gpus[@]}"; do
      file=$gs_dcgm_dir/$gpu kept=''
      if [[ -r $file ]]; then
        while IFS= read -r line || [[ -n $line ]]; do
          [[ -z $line || $line == "$gs_job" ]] || kept+=$line$'\n'
        done <"$file"
      fi
      [[ $1 == add ]] && kept+=$gs_job$'\n'
      # In place: exporters watch the file itself, and the lock keeps our own writers apart.
      if [[ -n $kept ]]; then printf '%s' "$kept" >"$file"; else rm -f -- "$file"; fi
    done
  } 9>"$gs_dcgm_dir/.gpushare.lock"
}
