# shellcheck shell=bash
# What prolog, epilog and task prolog have in common: gpushare.conf, and the node's state directory (its layout is in
# slurm_gpushare/node/sampler.py). Nothing here may fail the caller, take long, or ask Slurm anything: slurmd waits for us.

# Slurm sets no search path for a prolog; one that is set (a test, a wrapper) comes first.
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

# >>> made
# Written by scripts/make_reference.py from slurm_gpushare/protocol/: edit there, then run 'make reference'.
# Kinds and defaults of the settings that a node needs, and the names of all others.
declare -gA GS_KINDS=(
  [partitions]=names
  [spooldir]=path
  [dcgmjobmappingdir]=optional_path
  [epiloghold]=number:0:2
  [frameworkmemory]=choice:grow:fence:leave
  [mps]=choice:off:user:all
  [slurmuser]=text
  [statedir]=path
)
declare -gA GS_DEFAULTS=(
  [partitions]=''
  [spooldir]='/var/spool/gpushare'
  [dcgmjobmappingdir]=''
  [epiloghold]='1'
  [frameworkmemory]='grow'
  [mps]='off'
  [slurmuser]='slurm'
  [statedir]='/run/gpushare'
)
GS_SITE='partitions shardspergpu gpumodel storeurl hookfile spooldir recordsto publicdir dcgmjobmappingdir probeseconds
backend leaseseconds tickseconds epiloghold keepdays policy objective shareacross sharegangs residentbudget
guestcap extendtimelimit frameworkmemory mps onslowdown rawshards'
GS_NOT_OF_SITE='slurmversion gpuspernode defcpupergpu defmempergpu slurmuser nodeusers mungesocket statedir sampleseconds
interimseconds heartbeatseconds memoryheadroom pausemost'
GS_WRITES_GRES_WITH_SLASH=231100
# <<< made

# Takes blanks off both ends of $1; sets gs_trimmed.
gs_trim() {
  gs_trimmed=${1#"${1%%[! $'\t\r']*}"}
  gs_trimmed=${gs_trimmed%"${gs_trimmed##*[! $'\t\r']}"}
}

# Sets gs_value to what $2 is as a value of kind $1 ("number:0:2"); false if it is none.
gs_parse_value() {
  local bounds=${1#*:} whole
  gs_value=$2
  case ${1%%:*} in
    names) gs_parse_names "$2" ;;
    path) [[ $2 == /* ]] ;;
    optional_path) [[ -z $2 || $2 == /* ]] ;;
    text) [[ -n $2 ]] ;;
    choice) gs_value=${2,,} && [[ $2 != *:* && -n $2 && :$bounds: == *:"$gs_value":* ]] ;;
    number) # from 0 on
      [[ $2 == *[0-9]* && $2 =~ ^0*([0-9]{0,9})(\.[0-9]*)?$ ]] || return
      whole=${BASH_REMATCH[1]:-0}
      ((whole < ${bounds#*:})) || [[ $whole == "${bounds#*:}" && ${BASH_REMATCH[2]} != *[1-9]* ]]
      ;;
  esac
}

# Sets gs_value to the names in a list with commas; false if one of them has a blank in it.
gs_parse_names() {
  local part rest=$1,
  gs_value=''
  while [[ -n $rest ]]; do
    gs_trim "${rest%%,*}"
    part=$gs_trimmed rest=${rest#*,}
    [[ $part != *[$' \t\r']* ]] || return
    [[ -z $part ]] || gs_value+=${gs_value:+,}$part
  done
}

# Reads file $1, of the keys there those named in $2 alone, into gs_KEY; gs_seen becomes the keys. False if there is none or
# if it has a mistake, as of the next two: what could be read is then set all the same.
gs_parse_file() {
  local line key all=" ${GS_SITE//$'\n'/ } ${GS_NOT_OF_SITE//$'\n'/ } " bad=0
  gs_seen=' '
  [[ -r $1 && -f $1 ]] || return 1 # to open a pipe would wait for a writer, for ever
  while IFS= read -r line || [[ -n $line ]]; do
    gs_trim "${line%%#*}"
    line=$gs_trimmed
    [[ -n $line ]] || continue
    gs_trim "${line%%=*}"
    key=${gs_trimmed,,}
    [[ $line == *=* && $key =~ ^[a-z]+$ && $all == *" $key "* && $gs_seen != *" $key "* ]] || { bad=1; continue; }
    [[ " ${2//$'\n'/ } " == *" $key "* ]] || continue
    gs_seen+="$key "
    [[ -n ${GS_KINDS[$key]:-} ]] || continue
    gs_trim "${line#*=}"
    gs_parse_value "${GS_KINDS[$key]}" "$gs_trimmed" && printf -v "gs_$key" %s "$gs_value" || bad=1
  done <"$1"
  ((!bad))
}

# Sets gs_partitions, gs_statedir and what else the scripts need from gpushare.conf $1 and the generated file beside it.
gs_parse_conf() {
  local key bad=0 seen generated=${1%.conf}.generated.conf
  for key in "${!GS_DEFAULTS[@]}"; do printf -v "gs_$key" %s "${GS_DEFAULTS[$key]}"; done
  gs_parse_file "$1" "$GS_SITE $GS_NOT_OF_SITE" || bad=1
  seen=$gs_seen
  if [[ -e $generated ]]; then
    gs_parse_file "$generated" "$GS_NOT_OF_SITE" && [[ $gs_seen != ' ' ]] || bad=1
  fi
  gs_seen=$seen
  ((!bad))
}

# Reads gpushare.conf; where it is away, has a mistake or not a single setting, the copy of the last good one that a sampler
# has kept (slurm_gpushare/protocol/settings_in_force.py).
gs_read_conf() {
  local conf=/etc/slurm/gpushare.conf copy=${GPUSHARE_LAST_GOOD:-/var/lib/gpushare/gpushare.conf.good} first=''
  [[ -z ${SLURM_CONF:-} ]] || conf=${SLURM_CONF%/*}/gpushare.conf
  conf=${GPUSHARE_CONF:-$conf}
  gs_parse_conf "$conf" && [[ $gs_seen != ' ' ]] && return
  if [[ -r $copy && -f $copy ]]; then
    IFS= read -r first <"$copy"
    [[ $first == "# last good settings of $conf" ]] && gs_parse_conf "$copy" && return
    gs_parse_conf "$conf"
  fi
  return 1
}

# Sets gs_job, gs_node, gs_node_dir from Slurm's environment; false if this is no job's prolog or epilog.
gs_read_job() {
  gs_job=${SLURM_JOB_ID:-}
  gs_node=${SLURMD_NODENAME:-$(hostname -s)}
  [[ $gs_job =~ ^[0-9]{1,10}$ && $gs_node =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || return 1
  gs_node_dir=$gs_statedir/nodes/$gs_node
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

# Closes all but the first three descriptors: slurmd waits until nobody has its own open any more.
gs_close_all() {
  local fd
  for fd in /proc/"$BASHPID"/fd/*; do
    fd=${fd##*/}
    ((fd > 2)) && eval "exec $fd>&-"
  done
}
