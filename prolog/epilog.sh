#!/bin/bash
# Epilog drop-in: tells the job's sampler to finish, and removes what the prolog left. Runs as root, always exits 0.
# It does not wait for the sampler, which needs a moment to write its record and is not slurmd's concern. It may wait for
# the helper: see hold.sh.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}") || exit 0
# shellcheck source=common.sh
. "${gs_here%/*}/common.sh" || exit 0
# shellcheck source=hold.sh
. "${gs_here%/*}/hold.sh" || exit 0

main() {
  local pid='' start='' pid_file gpu files=()
  # Without settings too: a sampler that nobody stops would go on until its job's last process is long gone.
  gs_read_conf || gs_epilog_hold_s=0
  gs_read_job || return
  pid_file=$gs_node_dir/jobs/$gs_job
  [[ -r $pid_file ]] && read -r pid start _ <"$pid_file"
  # First the file, then the signal: a sampler that is still starting looks for the file.
  rm -f -- "$pid_file"
  gs_is_process "$pid" "$start" && kill -TERM "$pid"

  gs_read_gpus || gs_read_registered_gpus
  for gpu in "${gs_gpus[@]}"; do files+=("$gs_node_dir/gpus/$gpu/$gs_job"); done
  rm -f -- "${files[@]}"
  gs_dcgm remove
  rm -f -- "$gs_node_dir/epoch/$gs_job" "$gs_node_dir/tokens/$gs_job"
  gs_hold_card
}

main 2>/dev/null
exit 0
