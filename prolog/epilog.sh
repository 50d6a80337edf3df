#!/bin/bash
# Epilog drop-in: tells the job's sampler to finish, and removes what the prolog left. Runs as root, always exits 0.
# It does not wait for the sampler, which needs a moment to write its record and is not slurmd's concern.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}") || exit 0
# shellcheck source=common.sh
. "${gs_here%/*}/common.sh" || exit 0

main() {
  local pid='' start='' pid_file gpu files=()
  gs_read_conf && gs_read_job || return
  pid_file=$gs_node_dir/jobs/$gs_job
  [[ -r $pid_file ]] && read -r pid start _ <"$pid_file"
  # First the file, then the signal: a sampler that is still starting looks for the file.
  rm -f -- "$pid_file"
  gs_is_process "$pid" "$start" && kill -TERM "$pid"

  gs_read_gpus
  for gpu in "${gs_gpus[@]}"; do files+=("$gs_node_dir/gpus/$gpu/$gs_job"); done
  rm -f -- "${files[@]}"
  gs_dcgm remove
  remove_epoch_dir "$gs_node_dir/epoch"
}

# The directory is the user's own and may hold anything: what is not gone in time goes with a later epilog.
remove_epoch_dir() {
  [[ -d $1/$gs_job ]] || return
  [[ ! -e $1/$gs_job/done ]] || rm -f -- "$1/$gs_job/done"
  rmdir -- "$1/$gs_job" && return
  mv -- "$1/$gs_job" "$1/.old.$gs_job.$$"
  timeout 0.1 rm -rf --one-file-system -- "$1"/.old.*
}

main 2>/dev/null
exit 0
