#!/usr/bin/env bash
# Installs what the Makefile's targets need: Debian packages, .venv, this package.
# A second run finds everything in place and returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  python3 python3-venv gcc libc6-dev
  slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin munge
  mariadb-server debootstrap
  lua5.1 lua5.3 lua5.4 lua-sql-sqlite3 sqlite3 binutils
  chromium fonts-dejavu-core
  rpm zstd systemd bubblewrap
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]})); then
  if ((EUID)); then
    echo "setup: error: missing Debian packages, and only root can install them. Run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # The daemons' packages would start them; ours are private ones, so nothing starts here.
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get -qq update
  apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
fi

stamp=.venv/.installed
lock=requirements/test.txt
wanted=$(sha256sum setup.cfg lab/setup.cfg pyproject.toml scripts/setup.sh "$lock" | sha256sum)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "setup: making .venv"
  [[ -x .venv/bin/python ]] || /usr/bin/python3 -m venv .venv
  pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check)
  if .venv/bin/python -c 'import platform, sys; sys.exit((sys.version_info[:2], platform.machine()) != ((3, 11), "x86_64"))'; then
    # Exactly the files that were locked: what an index offers today, or in somebody's name, does not get in.
    "${pip[@]}" --require-hashes --requirement "$lock"
    "${pip[@]}" --no-deps --no-build-isolation --editable . --editable lab
  else
    echo "setup: $lock is for Python 3.11 on x86_64; here pip chooses versions"
    "${pip[@]}" --upgrade pip setuptools
    "${pip[@]}" --editable '.[controller,mariadb,test]' --editable lab
  fi
  printf '%s' "$wanted" >"$stamp"
fi
