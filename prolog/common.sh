# shellcheck shell=bash
# What prolog, epilog and task prolog have in common: gpushare.conf, and the node's state directory.
# Sourced, never run. Nothing here may fail the caller, take long, or ask Slurm anything: slurmd waits for us,
# and a prolog that fails drains the node.
# The state directory's layout is described in slurm_gpushare/node/sampler.py.

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

# The keys of gpushare.conf (slurm_gpushare/protocol/settings.py): a line with any other is a mistake.
GS_KEYS=" partitions shardspergpu gpumodel gpuspernode slurmversion defcpupergpu defmempergpu storeurl hookfile spooldir \
recordsto mungesocket slurmuser nodeusers statedir publicdir dcgmjobmappingdir sampleseconds interimseconds \
probeseconds backend leaseseconds tickseconds epiloghold keepdays heartbeatseconds policy objective shareacross \
sharegangs residentbudget guestcap memoryheadroom extendtimelimit frameworkmemory onslowdown pausemost rawshards "

# Takes blanks off both ends of $1; sets gs_trimmed.
gs_trim() {
  gs_trimmed=${1#"${1%%[! $'\t\r']*}"}
  gs_trimmed=${gs_trimmed%"${gs_trimmed##*[! $'\t\r']}"}
}

# Sets gs_partitions, gs_state_dir and what else the scripts need from file $1; false if there is none, or if it has a
# mistake: what could be read is then set all the same.
gs_parse_conf() {
  local line key value bad=0
  gs_seen=' '
  gs_partitions='' gs_state_dir=/run/gpushare gs_dcgm_dir='' gs_spool_dir=/var/spool/gpushare gs_slurm_user=slurm
  gs_hold_s=1 gs_framework_memory=grow
  [[ -r $1 && -f $1 ]] || return 1 # to open a pipe would wait for a writer, for ever
  while IFS= read -r line || [[ -n $line ]]; do
    gs_trim "${line%%#*}"
    line=$gs_trimmed
    [[ -n $line ]] || continue
    [[ $line == *=* ]] || { bad=1; continue; }
    gs_trim "${line%%=*}"
    key=${gs_trimmed,,}
    gs_trim "${line#*=}"
    value=$gs_trimmed
    [[ $key =~ ^[a-z]+$ && $GS_KEYS == *" $key "* && $gs_seen != *" $key "* ]] || { bad=1; continue; }
    gs_seen+="$key "
    case $key in
      partitions) gs_read_names "$value" && gs_partitions=$gs_names || bad=1 ;;
      statedir) [[ $value == /* ]] && gs_state_dir=$value || bad=1 ;;
      dcgmjobmappingdir) [[ -z $value || $value == /* ]] && gs_dcgm_dir=$value || bad=1 ;;
      spooldir) [[ $value == /* ]] && gs_spool_dir=$value || bad=1 ;;
      slurmuser) [[ -n $value ]] && gs_slurm_user=$value || bad=1 ;;
      epiloghold) [[ $value =~ ^(0*[01](\.[0-9]*)?|0*2(\.0*)?|\.[0-9]+)$ ]] && gs_hold_s=$value || { gs_hold_s=0 bad=1; } ;;
      frameworkmemory) [[ ${value,,} == grow || ${value,,} == leave ]] && gs_framework_memory=${value,,} || bad=1 ;;
    esac
  done <"$1"
  ((!bad))
}

# Sets gs_names to the names in a list with commas; false if one of them has a blank in it.
gs_read_names() {
  local part rest=$1,
  gs_names=''
  while [[ -n $rest ]]; do
    gs_trim "${rest%%,*}"
    part=$gs_trimmed rest=${rest#*,}
    [[ $part != *[$' \t\r']* ]] || return
    [[ -z $part ]] || gs_names+=${gs_names:+,}$part
  done
}

# Reads gpushare.conf; where it is away, has a mistake or not a single setting, the copy of the last good one that a sampler has kept
# (slurm_gpushare/protocol/settings_in_force.py). False if there is neither: what could be read is then set all the same.
gs_read_conf() {
  local copy=${GPUSHARE_LAST_GOOD:-/var/lib/gpushare/gpushare.conf.good} first=''
  gs_conf_file
  gs_parse_conf "$gs_conf" && [[ $gs_seen != ' ' ]] && return
  if [[ -r $copy && -f $copy ]]; then
    IFS= read -r first <"$copy"
    [[ $first == "# last good settings of $gs_conf" ]] && gs_parse_conf "$copy" && return
    gs_parse_conf "$gs_conf"
  fi
  return 1
}

# Sets gs_job, gs_node, gs_node_dir from Slurm's environment; false if this is no job's prolog or epilog.
gs_read_job() {
  gs_job=${SLURM_JOB_ID:-}
  gs_node=${SLURMD_NODENAME:-$(hostname -s)}
  [[ $gs_job =~ ^[0-9]{1,10}$ && $gs_node =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || return 1
  gs_node_dir=$gs_state_dir/nodes/$gs_node
}

# Whether the job runs in a partition whose jobs share.
gs_is_shared_partition() {
  [[ -n ${SLURM_JOB_PARTITION:-} && ,$gs_partitions, == *,"$SLURM_JOB_PARTITION",* ]]
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

# Sets gs_gpus to those that the sampler found, where Slurm did not say.
gs_read_registered_gpus() {
  local file
  gs_gpus=()
  for file in "$gs_node_dir"/gpus/*/"$gs_job"; do
    file=${file%/*}
    [[ ${file##*/} =~ ^[0-9]{1,3}$ ]] && gs_gpus+=("${file##*/}")
  done
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

# Makes a lock file that only we can open: whoever can open one can hold the lock.
gs_private_lock() {
  [[ -e $1 ]] || (umask 077 && : >>"$1")
  chmod 600 -- "$1"
}

# Adds ($1 = add) the job's line to DCGM's job mapping file of each of its GPUs, or removes it from all files: the sampler
# may have added it to some that Slurm does not name (slurm_gpushare/node/dcgm.py). Others' lines stay.
gs_dcgm() {
  local gpu file line kept found gpus=("${gs_gpus[@]}")
  [[ -n $gs_dcgm_dir ]] && (umask 022 && mkdir -p "$gs_dcgm_dir") || return 0
  gs_private_lock "$gs_dcgm_dir/.gpushare.lock"
  {
    flock -w 0.2 9 || return 0
    if [[ $1 != add ]]; then
      gpus=()
      for file in "$gs_dcgm_dir"/*; do [[ ${file##*/} =~ ^[0-9]{1,3}$ ]] && gpus+=("${file##*/}"); done
    fi
    for gpu in "${gpus[@]}"; do
      file=$gs_dcgm_dir/$gpu kept='' found=''
      if [[ -r $file ]]; then
        while IFS= read -r line || [[ -n $line ]]; do
          [[ $line == "$gs_job" ]] && found=1 && continue
          [[ -z $line ]] || kept+=$line$'\n'
        done <"$file"
      fi
      [[ $1 == add || -n $found ]] || continue
      [[ $1 == add ]] && kept+=$gs_job$'\n'
      # In place: exporters watch the file itself, and the lock keeps our own writers apart.
      # Readable for the exporter, whatever our umask.
      if [[ -n $kept ]]; then
        printf '%s' "$kept" >"$file" && chmod 644 -- "$file"
      else
        rm -f -- "$file"
      fi
    done
  } 9>"$gs_dcgm_dir/.gpushare.lock"
}
