# shellcheck shell=bash
# Keeps a card that has just become empty until the helper has looked at it, for EpilogHold seconds at the most.
# While a node has a job in its epilog Slurm starts nothing there, so the helper decides who gets the card.
# Sourced by epilog.sh after common.sh. Asks Slurm nothing: what is known here is what the helper has written to
# SpoolDir/hold (slurm_gpushare/helper/hold.py has the layout) and this node's own record of its holds.

# A node is held for at most this much of any minute, all its cards together.
GS_MINUTE_MS=60000 GS_MINUTE_SHARE_MS=6000
# A shorter hold than this would be over before anybody could answer.
GS_SHORTEST_HOLD_MS=50

gs_hold_card() {
  local board=$gs_spool_dir/hold hold_ms now_ms begin_ms end_ms beat answered=0 silent
  gs_to_ms "$gs_epilog_hold_s" && ((hold_ms > 0)) || return
  ((hold_ms <= 2000)) || hold_ms=2000
  gs_is_shared_partition && gs_card_is_empty && gs_is_trusted "$board" && gs_is_wanted "$board/helper" || return
  gs_reserve_hold || return
  # A pipe that nobody writes to: waiting on it starts no process, unlike `sleep`, of which a busy node would run hundreds.
  exec {silent}<> <(:)
  while gs_now_ms && ((now_ms < end_ms)); do
    gs_has_answer "$board/answers/$gs_node" && answered=1 && break
    read -r -t 0.02 -u "$silent" _
  done
  gs_note_hold
}

# Sets now_ms. Bash before 5.0 has no EPOCHREALTIME.
gs_now_ms() {
  now_ms=${EPOCHREALTIME:-}
  if [[ -n $now_ms ]]; then
    now_ms=${now_ms/[.,]/}
    now_ms=${now_ms%???}
  else
    now_ms=$(date +%s%3N)
  fi
}

# Sets hold_ms from a number of seconds; false if it is none.
gs_to_ms() {
  [[ $1 =~ ^([0-9])?(\.([0-9]{0,3})[0-9]*)?$ ]] || return
  local thousandths=${BASH_REMATCH[3]}000
  hold_ms=$((${BASH_REMATCH[1]:-0} * 1000 + 10#${thousandths:0:3}))
}

# Whether nobody is left on one of the job's cards; the job's own files are gone already.
gs_card_is_empty() {
  local gpu file
  for gpu in "${gs_gpus[@]}"; do
    for file in "$gs_node_dir/gpus/$gpu"/*; do [[ -e $file ]] && continue 2; done
    return 0
  done
  return 1
}

# Whether only SlurmUser (or root) can have written what is in directory $1.
gs_is_trusted() {
  local name uid mode kind
  read -r name uid mode kind < <(stat -c '%U %u %a %F' -- "$1")
  [[ $kind == directory && ($name == "$gs_slurm_user" || $uid == "$gs_slurm_user" || $uid == 0) ]] || return
  (((8#$mode & 8#022) == 0))
}

# Whether the helper is alive and somebody waits who could use a card of this node. Sets beat.
gs_is_wanted() {
  local until_ms without now_ms
  read -r beat until_ms without _ <"$1" || return
  [[ $beat =~ ^[0-9]{1,18}$ && $until_ms =~ ^[0-9]{1,18}$ && ,$without, != *,"$gs_node",* ]] || return
  gs_now_ms
  ((now_ms < until_ms))
}

gs_has_answer() {
  local jobs=''
  [[ -r $1 ]] && read -r jobs <"$1"
  [[ " $jobs " == *" $gs_job "* ]]
}

# The record of holds: a line each of begin, end, the helper's beat that was seen, whether it answered, and the job.
# Reads those of the last minute into `holds`, in the order of their begin.
gs_read_holds() {
  local line begin rest
  holds=()
  [[ -r $gs_node_dir/holds ]] || return
  while read -r begin rest; do
    [[ $begin =~ ^[0-9]{1,18}$ ]] && ((begin > now_ms - GS_MINUTE_MS && begin <= now_ms)) && holds+=("$begin $rest")
  done <"$gs_node_dir/holds"
}

gs_write_holds() {
  ((${#holds[@]} == 0)) || printf '%s\n' "${holds[@]}" >"$gs_node_dir/holds"
}

# Sets begin_ms and end_ms, and writes the hold down as if it would last that long. False if there is no time left in
# this minute, or if the helper left a hold unanswered and has not shown since that it is alive.
gs_reserve_hold() {
  local holds now_ms begin end seen ok covered_ms=0 used_ms=0 line
  gs_private_lock "$gs_node_dir/holds.lock"
  {
    flock -w 0.1 8 || return
    gs_now_ms
    gs_read_holds
    for line in "${holds[@]}"; do
      read -r begin end seen ok _ <<<"$line"
      ((ok == 1 || seen != beat || end > now_ms)) || return
      ((begin > covered_ms)) && covered_ms=$begin
      ((end > covered_ms)) && used_ms=$((used_ms + end - covered_ms)) covered_ms=$end
    done
    begin_ms=$now_ms end_ms=$((now_ms + hold_ms))
    ((end_ms - begin_ms <= GS_MINUTE_SHARE_MS - used_ms)) || end_ms=$((begin_ms + GS_MINUTE_SHARE_MS - used_ms))
    ((end_ms - begin_ms >= GS_SHORTEST_HOLD_MS)) || return
    holds+=("$begin_ms $end_ms $beat 0 $gs_job")
    gs_write_holds
  } 8>>"$gs_node_dir/holds.lock"
}

# Writes down how long the hold lasted and whether it was answered.
gs_note_hold() {
  local holds now_ms i
  {
    flock -w 0.1 8 || return
    gs_now_ms
    gs_read_holds
    for i in "${!holds[@]}"; do
      [[ ${holds[i]} == "$begin_ms "*" $gs_job" ]] && holds[i]="$begin_ms $now_ms $beat $answered $gs_job"
    done
    gs_write_holds
  } 8>>"$gs_node_dir/holds.lock"
}
