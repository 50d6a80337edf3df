#!/usr/bin/env bash
# readable.sh COMMAND...: runs a command so that every user can read this checkout.
# The tests run jobs of ordinary users, who cannot enter, say, /root (mode 700). Where a directory on the way is closed,
# the command gets a mount namespace in which that one directory is an open one with the same contents; nothing
# changes for the rest of the machine, and nothing remains.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd -P)

closed_directory() { # the first one on the way that others may not enter
  local path=''
  local IFS=/
  for part in ${checkout#/}; do
    path+=/$part
    if (($(stat -c '0%a' "$path") % 8 % 2 == 0)); then
      echo "$path"
      return
    fi
  done
}

if [[ ${1:-} == --inside ]]; then
  shift
  while closed=$(closed_directory) && [[ -n $closed ]]; do
    original=$(mktemp -d)
    mount --rbind "$closed" "$original"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    shopt -s nullglob dotglob
    for entry in "$original"/*; do
      here=$closed/${entry##*/}
      if [[ -L $entry ]]; then
        cp -P "$entry" "$here"
      elif [[ -d $entry ]]; then
        mkdir "$here"
        mount --rbind "$entry" "$here"
      elif [[ -f $entry ]]; then
        touch "$here"
        mount --bind "$entry" "$here"
      fi
    done
    umount --lazy "$original"
    rmdir "$original"
  done
  cd "$checkout"
  exec "$@"
fi

if ((EUID)) || [[ -z $(closed_directory) ]]; then
  exec "$@"
fi
mkdir -p "${XDG_CACHE_HOME:-$HOME/.cache}" # made inside, it would be lost
exec unshare --mount --propagation private "$0" --inside "$@"
