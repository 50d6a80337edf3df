#!/bin/bash
# Epilog drop-in: tells the job's sampler to finish, and removes what the prolog left. Runs as root, always exits 0.
# It does not wait for the sampler, which needs a moment to write its record and is not slurmd's concern.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}") || exit 0
# shellcheck source=common.sh
. "${gs_here%/*}/common.sh" || exit 0

main() {
  local pid start pid_file gpu
  gs_read_conf && gs_read_job || return
  pid_file=$gs_node_dir/jobs/$gs_job
  pid='' start=''
  [[ -r $pid_file ]] && read -r pid start _ <"$pid_file"
  # First the file, then the signal: a sampler that is still starting looks for the file.
  rm -f -- "$pid_file"
  gs_is_process "$pid" "$start" && kill -TERM "$pid"

  gs_read_gpus
  for gpu in "${gs_gpus[@]}"; do
    rm -f -- "$gs_node_dir/gpus/$gpu/$gs_job"
  done
  gs_dcgm remove
  # The user's own directory may hold anything: what is not gone in time goes with a later epilog.
  [[ -d $gs_node_dir/epoch/$gs_job ]] && mv -- "$gs_node_dir/epoch/$gs_job" "$gs_node_dir/epoch/.old.$gs_job.$$"
  timeout 0.1 rm -rf --one-file-system -- "$gs_node_dir"/epoch/.old.*
}

main 2>/dev/null
exit 0
