#!/bin/bash
# Prolog drop-in: starts the sampler of a job that runs on a shared partition, and returns.
# Runs as root. Always exits 0: anything else drains the node and holds the job.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}")
# shellcheck source=common.sh
. "${gs_here%/*}/common.sh" || exit 0

# Detached for good: own session, no descriptor of slurmd's. slurmd kills the prolog's process group when the prolog ends,
# and waits for its output to close. Its environment is empty but for what it needs: what somebody may have put into
# slurmd's or the job's must not reach a process of root's. GPUSHARE_KEEP_ENV names further variables.
start_sampler() {
  local i name kept=()
  for name in PATH SLURM_CONF GPUSHARE_CONF GPUSHARE_LAST_GOOD ${GPUSHARE_KEEP_ENV:-}; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ && -n ${!name:-} ]] && kept+=("$name=${!name}")
  done
  (
    cd / || exit
    gs_close_all
    ((${#gs_gpus[@]})) || may_search || exit
    trap '' TERM INT HUP # until the sampler is up: an epilog may come before that
    IFS=, # joins the GPUs
    exec env -i "${kept[@]}" setsid nice -n 10 "${GPUSHARE_PYTHON:-python3}" -I -m slurm_gpushare.node.sampler \
      "$gs_job" "$gs_node" "${gs_gpus[*]}"
  ) </dev/null >>"$gs_node_dir/sampler.log" 2>&1 &
  pid=$!
  # To return before it has its own session would be to have it killed.
  for ((i = 0; i < 80; i++)); do # a node without a free core takes its time
    gs_read_stat "$pid" || return
    [[ ${gs_stat[GS_SESSION]} == "$pid" ]] && return
    sleep 0.01
  done
}

# Users may enter what leads to their job's files, and list or write nothing.
make_directories() {
  local directory
  for directory in "$gs_statedir" "$gs_statedir/nodes" "$gs_node_dir" "$gs_node_dir/epoch" "$gs_node_dir/tokens"; do
    [[ -d $directory ]] || install -d -m 711 "$directory" || return
  done
  mkdir -p "$gs_node_dir/jobs" "${gs_gpus[@]/#/$gs_node_dir/gpus/}"
}

# Where the job may tell that its epoch is over, by touching it: a null device of the job's user, so that neither its
# size nor the number of files can grow. It is touched once its time is later than 1970.
make_epoch_file() {
  [[ ${SLURM_JOB_UID:-} =~ ^[0-9]+$ && ! -e $1 ]] || return
  mknod -m 200 "$1" c 1 3 && touch -d @0 "$1" && chown "$SLURM_JOB_UID" "$1" || rm -f -- "$1"
}

# Whether the job's comment has our word.
takes_part() {
  [[ ${SLURM_JOB_COMMENT:-} == *[gG][pP][uU][sS][hH][aA][rR][eE][:=]* ]]
}

# Whether a further sampler may look for its job's GPUs: more than eight at once would only be a user's, whose CPU jobs have
# our word in their comments. Each has a lock, as descriptor 9, until its search is over (slurm_gpushare/node/sampler.py).
may_search() {
  local slot
  for slot in {1..8}; do
    exec 9>>"$gs_node_dir/search.$slot" && flock -n 9 && return
  done
  printf '%(%Y-%m-%dT%H:%M:%S)T prolog[%s] job %s: not measured: Slurm names no GPU of it, and %s samplers look for theirs already\n' \
    -1 "$$" "$gs_job" "$slot"
  return 1
}

# Makes a job that may share one card a client of the card's MPS daemon, which starts with the first of them. Where
# somebody is who came without, or no daemon starts, there is none, and nobody is under it.
join_mps() {
  local gpu=${gs_gpus[0]:-} other multi=''
  [[ ${gs_mps:-off} != off && ${#gs_gpus[@]} == 1 ]] && takes_part || return
  for other in "$gs_node_dir/gpus/$gpu"/*; do
    [[ ! -e $other || ${other##*/} == "$gs_job" || -e $gs_node_dir/mps/${other##*/} ]] || return
  done
  install -d -m 711 "$gs_statedir/mps" "$gs_node_dir/mps" || return
  [[ $gs_mps != all ]] || multi=-multiuser-server
  echo "MULTI_USER=$multi" >"$gs_statedir/mps/options"
  timeout 8 systemctl start "gpushare-mps@$gpu" || return
  echo "$gs_statedir/mps/$gpu" >"$gs_node_dir/mps/$gs_job" && chmod 644 "$gs_node_dir/mps/$gs_job"
}

# Says that the job was given these GPUs, and whose it is: by its owner a process is known that left the job.
register() {
  local gpu
  for gpu in "${gs_gpus[@]}"; do echo "${SLURM_JOB_UID:--}" >"$gs_node_dir/gpus/$gpu/$gs_job"; done
}

main() {
  local pid_file pid start
  gs_read_conf # with a mistake in it and no earlier copy: the sampler says in its log what the mistake is
  gs_read_job && gs_is_shared_partition || return
  # A job with our word and without GPUs: slurmctld has just started and does not say, and the sampler finds out. Any
  # other without GPUs is a CPU job, of which a node may have hundreds.
  gs_read_gpus || takes_part || return
  umask 077
  make_directories || return
  if [[ ${gs_mps:-off} == off ]]; then
    register
  else # two that start at once on a card agree on whether it is under MPS
    { flock -w 8 7; join_mps; register; } 7>>"$gs_node_dir/mps.lock"
  fi

  pid_file=$gs_node_dir/jobs/$gs_job
  if read -r pid start _ 2>/dev/null <"$pid_file" && gs_is_process "$pid" "$start"; then
    return # run twice: the first sampler is at work
  fi
  # The task prolog, which is told no comment, must know it too.
  if takes_part; then
    : >"$gs_node_dir/tokens/$gs_job"
    make_epoch_file "$gs_node_dir/epoch/$gs_job"
  fi
  start_sampler && echo "$pid ${gs_stat[GS_START]}" >"$pid_file"
}

main 2>/dev/null
exit 0
