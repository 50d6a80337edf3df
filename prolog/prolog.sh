#!/bin/bash
# Prolog drop-in: starts the sampler of a job that was given GPUs on a shared partition, and returns.
# Runs as root. Always exits 0: anything else drains the node and holds the job.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}") || exit 0
gs_here=${gs_here%/*}
# shellcheck source=common.sh
. "$gs_here/common.sh" || exit 0

# The interpreter that this package is installed for: a checkout's, a virtual environment's, else the system's.
find_python() {
  local candidate
  for candidate in "${GPUSHARE_PYTHON:-}" "$gs_here/../.venv/bin/python" "$gs_here"/../../../../../bin/python3; do
    [[ -n $candidate && -x $candidate ]] && python=$candidate && return
  done
  python=python3
}

# Detached for good: own session, no descriptor of slurmd's, low priority. slurmd kills the prolog's process group
# when the prolog ends, and waits for its output to close; neither reaches a sampler started like this.
start_sampler() {
  local fd i
  (
    cd / || exit
    for fd in /proc/"$BASHPID"/fd/*; do
      fd=${fd##*/}
      ((fd > 2)) && eval "exec $fd>&-"
    done
    trap '' TERM INT HUP # until the sampler is up: an epilog may come before that
    IFS=, # joins the GPUs
    exec setsid nice -n 10 "$python" -m slurm_gpushare.telemetry.sampler "$gs_job" "$gs_node" "${gs_gpus[*]}"
  ) </dev/null >>"$gs_node_dir/sampler.log" 2>&1 &
  pid=$!
  # To return before it has its own session would be to have it killed.
  for ((i = 0; i < 20; i++)); do
    gs_read_stat "$pid" || return
    [[ ${gs_stat[GS_SESSION]} == "$pid" ]] && return
    sleep 0.01
  done
}

main() {
  local pid_file pid start gpu
  gs_read_conf && gs_read_job && gs_read_gpus || return
  [[ -n ${SLURM_JOB_PARTITION:-} && ,$gs_partitions, == *,"$SLURM_JOB_PARTITION",* ]] || return
  umask 022
  mkdir -p "$gs_node_dir/jobs" "$gs_node_dir/epoch" "${gs_gpus[@]/#/$gs_node_dir/gpus/}" || return
  for gpu in "${gs_gpus[@]}"; do
    : >"$gs_node_dir/gpus/$gpu/$gs_job"
  done
  gs_dcgm add

  pid_file=$gs_node_dir/jobs/$gs_job
  if read -r pid start _ 2>/dev/null <"$pid_file" && gs_is_process "$pid" "$start"; then
    return # run twice: the first sampler is at work
  fi
  # Where the job may tell that its epoch is over: a directory of its own, which nobody else can write to.
  if [[ ${SLURM_JOB_UID:-} =~ ^[0-9]+$ && ! -e $gs_node_dir/epoch/$gs_job ]]; then
    install -d -m 700 -o "$SLURM_JOB_UID" "$gs_node_dir/epoch/$gs_job"
  fi
  find_python
  start_sampler || return
  echo "$pid ${gs_stat[GS_START]}" >"$pid_file"
}

main 2>/dev/null
exit 0
