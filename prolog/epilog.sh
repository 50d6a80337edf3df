#!/bin/bash
# Epilog drop-in: tells the job's sampler to finish, without waiting for its record, removes what the prolog left, and keeps
# a card that has just become empty until the helper has looked at it. Runs as root, always exits 0.

gs_here=$(readlink -f -- "${BASH_SOURCE[0]}")
# shellcheck source=common.sh
. "${gs_here%/*}/common.sh" || exit 0

# The hold. While a node has a job in its epilog Slurm starts nothing there, so the helper decides who gets the card, for
# EpilogHold seconds at the most (docs/helper.md). What is known here is what the helper has written to SpoolDir/hold
# (slurm_gpushare/helper/hold.py has the layout), a shared file system where whoever looks may hang. So nobody looks but one
# child of the node's, which copies what concerns the node to a file of its own, "board"; who holds reads that.

# A node is held for at most this much of any minute, all its cards together.
GS_MINUTE_MS=60000 GS_MINUTE_SHARE_MS=6000
# A shorter hold than this would be over before anybody could answer.
GS_SHORTEST_HOLD_MS=50
# A copy older than this says nothing; without one nobody is held longer than the second.
GS_FRESH_MS=150 GS_FIRST_COPY_MS=300
# So long a child copies: whoever holds longer starts another.
GS_COPYING_MS=2000

# Sets now_ms. Bash before 5.0 has no EPOCHREALTIME.
now() {
  now_ms=${EPOCHREALTIME:-}
  if [[ -n $now_ms ]]; then
    now_ms=${now_ms/[.,]/}
    now_ms=${now_ms%???}
  else
    now_ms=$(date +%s%3N)
  fi
}

# Waits $1 seconds, on a pipe that nobody writes to: that starts no process, of which a busy node would run hundreds.
pause() {
  [[ -n ${silent:-} ]] || exec {silent}<> <(:)
  read -r -t "$1" -u "$silent" _
}

# Whether nobody is left on one of the job's cards; the job's own files are gone already.
card_is_empty() {
  local gpu file
  for gpu in "${gs_gpus[@]}"; do
    for file in "$gs_node_dir/gpus/$gpu"/*; do [[ -e $file ]] && continue 2; done
    return 0
  done
  return 1
}

# In the child: whether only SlurmUser (or root) can have written what is in directory $1.
is_trusted() {
  local name uid mode kind
  read -r name uid mode kind < <(stat -c '%U %u %a %F' -- "$1")
  [[ $kind == directory && ($name == "$gs_slurmuser" || $uid == "$gs_slurmuser" || $uid == 0) ]] || return
  (((8#$mode & 8#022) == 0))
}

# In the child: one line, "TIME BEAT UNTIL WITHOUT JOBS ...", in place of the last one. "-" is what nobody said.
copy_board() {
  local from=$1 beat=- until_ms=- without=- jobs=''
  [[ -f $from/helper ]] && read -r beat until_ms without _ <"$from/helper"
  [[ -f $from/answers/$gs_node ]] && read -r jobs <"$from/answers/$gs_node"
  now
  echo "$now_ms $beat $until_ms $without $jobs" >"$gs_node_dir/board"
}

# Starts the child that copies, unless one is at work, or hangs: it has the lock until it ends.
start_copying() {
  (
    gs_close_all
    silent=''
    exec 9>>"$gs_node_dir/board.lock"
    flock -n 9 || exit
    from=$gs_spooldir/hold
    is_trusted "$from" || from=/nowhere
    now
    end_ms=$((now_ms + GS_COPYING_MS))
    while copy_board "$from" && ((now_ms < end_ms)); do pause 0.02; done
  ) </dev/null >/dev/null 2>&1 &
  children+=("$!")
}

# Sets beat, until_ms, without and jobs to what the helper says now; false if that is not to be had.
read_board() {
  local copied_ms=''
  now
  [[ -r $gs_node_dir/board ]] && read -r copied_ms beat until_ms without jobs <"$gs_node_dir/board"
  [[ $copied_ms =~ ^[0-9]{1,18}$ ]] && ((copied_ms <= now_ms && now_ms - copied_ms < GS_FRESH_MS))
}

# The same; waits for a first copy, or for that of a new child where the last one's time was over, but not past end_ms.
await_board() {
  local give_up_ms
  read_board && return
  give_up_ms=$((now_ms + GS_FIRST_COPY_MS < end_ms ? now_ms + GS_FIRST_COPY_MS : end_ms))
  start_copying
  until read_board; do
    ((now_ms < give_up_ms)) || return
    pause 0.01
  done
  return 0
}

# Whether the helper is alive and somebody waits who could use a card of this node.
is_wanted() {
  [[ $beat =~ ^[0-9]{1,18}$ && $until_ms =~ ^[0-9]{1,18}$ && ,$without, != *,"$gs_node",* ]] && ((now_ms < until_ms))
}

# The record of holds: a line each of begin, end, the helper's beat that was seen, whether it answered, and the job.
# Reads those of the last minute into `holds`, in the order of their begin.
read_holds() {
  local begin rest
  holds=()
  now
  [[ -r $gs_node_dir/holds ]] || return 0
  while read -r begin rest; do
    [[ $begin =~ ^[0-9]{1,18}$ ]] && ((begin > now_ms - GS_MINUTE_MS && begin <= now_ms)) && holds+=("$begin $rest")
  done <"$gs_node_dir/holds"
}

write_holds() {
  ((${#holds[@]} == 0)) || printf '%s\n' "${holds[@]}" >"$gs_node_dir/holds"
}

# Sets begin_ms and end_ms, and writes the hold down as if it would last until $1. False if there is no time left in this
# minute, or if the helper left a hold unanswered and has not shown since that it is alive.
reserve_hold() {
  local holds begin end seen ok covered_ms=0 used_ms=0 line
  {
    flock -w 0.1 8 || return
    read_holds
    for line in "${holds[@]}"; do
      read -r begin end seen ok _ <<<"$line"
      ((ok == 1 || seen != beat || end > now_ms)) || return
      ((begin > covered_ms)) && covered_ms=$begin
      ((end > covered_ms)) && used_ms=$((used_ms + end - covered_ms)) covered_ms=$end
    done
    begin_ms=$now_ms end_ms=$1
    ((end_ms - begin_ms <= GS_MINUTE_SHARE_MS - used_ms)) || end_ms=$((begin_ms + GS_MINUTE_SHARE_MS - used_ms))
    ((end_ms - begin_ms >= GS_SHORTEST_HOLD_MS)) || return
    holds+=("$begin_ms $end_ms $beat 0 $gs_job")
    write_holds
  } 8>>"$gs_node_dir/holds.lock"
}

# Writes down how long the hold lasted and whether it was answered ($1).
note_hold() {
  local holds i
  {
    flock -w 0.1 8 || return
    read_holds
    for i in "${!holds[@]}"; do
      [[ ${holds[i]} == "$begin_ms "*" $gs_job" ]] && holds[i]="$begin_ms $now_ms $seen_beat $1 $gs_job"
    done
    write_holds
  } 8>>"$gs_node_dir/holds.lock"
}

hold_card() {
  local hold_ms now_ms begin_ms end_ms beat until_ms without jobs seen_beat answered=0 children=()
  LC_ALL=C printf -v hold_ms %.0f "${gs_epiloghold}e3"
  ((hold_ms > 0)) && gs_is_shared_partition && card_is_empty || return
  umask 077 # whoever can open a lock can hold it
  now
  end_ms=$((now_ms + hold_ms))
  if await_board && is_wanted && seen_beat=$beat && reserve_hold "$end_ms"; then
    while now && ((now_ms < end_ms)) && await_board; do
      [[ " $jobs " == *" $gs_job "* ]] && answered=1 && break
      pause 0.02
    done
    note_hold "$answered"
  fi
  # One that hangs is left behind with its lock. Others who hold start their own.
  ((${#children[@]} == 0)) || kill -KILL "${children[@]}"
  ((${#children[@]} == 0)) || : >"$gs_node_dir/board"
}

# Takes the job out of DCGM's job mapping, a file a card and a line a job. In place: exporters watch the file itself.
unmap_job() {
  local file kept lock=$gs_dcgmjobmappingdir/.gpushare.lock
  [[ -n $gs_dcgmjobmappingdir && -e $lock ]] || return
  {
    flock -w 0.2 9 || return
    for file in "$gs_dcgmjobmappingdir"/*; do
      [[ ${file##*/} =~ ^[0-9]{1,3}$ ]] && grep -qx -- "$gs_job" "$file" || continue
      if kept=$(grep -vx -- "$gs_job" "$file"); then printf '%s\n' "$kept" >"$file"; else rm -f -- "$file"; fi
    done
  } 9<"$lock"
}

# Stops the MPS daemon of card $1 when nobody is left there: before any other job gets it, for nothing starts on a node
# whose epilog runs. One in FAULT is started anew so.
leave_mps() {
  local file
  [[ -e $gs_statedir/mps/$1/nvidia-cuda-mps-control.pid ]] || return
  for file in "$gs_node_dir/gpus/$1"/*; do [[ -e $file ]] && return; done
  timeout 8 systemctl stop "gpushare-mps@$1"
}

main() {
  local pid='' start='' pid_file gpu files=()
  # Without settings too: a sampler that nobody stops would go on until its job's last process is long gone.
  gs_read_conf || gs_epiloghold=0
  gs_read_job || return
  pid_file=$gs_node_dir/jobs/$gs_job
  [[ -r $pid_file ]] && read -r pid start _ <"$pid_file"
  # First the file, then the signal: a sampler that is still starting looks for the file.
  rm -f -- "$pid_file"
  gs_is_process "$pid" "$start" && kill -TERM "$pid"

  gs_read_gpus || gs_read_registered_gpus
  for gpu in "${gs_gpus[@]}"; do files+=("$gs_node_dir/gpus/$gpu/$gs_job"); done
  rm -f -- "${files[@]}" "$gs_node_dir/epoch/$gs_job" "$gs_node_dir/tokens/$gs_job" "$gs_node_dir/mps/$gs_job"
  for gpu in "${gs_gpus[@]}"; do leave_mps "$gpu"; done
  unmap_job
  hold_card
}

main 2>/dev/null
exit 0
