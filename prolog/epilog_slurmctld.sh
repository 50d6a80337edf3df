#!/bin/bash
# EpilogSlurmctld: tells the helper at once that a job of a shared partition has ended, and where.
# Runs on the controller as SlurmUser. Always exits 0, asks Slurm nothing, and waits for nobody.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}")
# shellcheck source=common.sh
. "${gs_here%/*}/common.sh" || exit 0

main() {
  local pipe line
  gs_read_conf && gs_is_shared_partition || return
  line="${SLURM_JOB_ID:-} ${SLURM_JOB_NODELIST:-}"
  # Longer lines would not be written in one piece; a job on so many nodes is no single-GPU job anyway.
  [[ $line =~ ^[0-9]{1,10}\ [A-Za-z0-9._,-]+(\[[0-9,-]+\][A-Za-z0-9._,-]*)*$ && ${#line} -lt 1000 ]] || return
  pipe=$gs_statedir/ended
  [[ -p $pipe && -w $pipe ]] || return
  # Without waiting: it fails at once where nobody reads, and where nobody empties the pipe.
  dd of="$pipe" oflag=nonblock conv=notrunc,nocreat status=none <<<"$line"
}

main 2>/dev/null
exit 0
