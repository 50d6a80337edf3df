#!/usr/bin/env bash
# try_rpms.sh DIST: what the RPMs ask for, run and hold; then installed, upgraded and removed in a copy of a clean Debian.
# Needs root and Debian's rpm. It has a database of its own there, and no Python 3.12: what needs that is not tried.
set -euo pipefail
dist=$(realpath "$1")
cache=${GPUSHARE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slurm-gpushare}/clean/trixie
node=$(ls "$dist"/slurm-gpushare-[0-9]*.rpm) controller=$(ls "$dist"/slurm-gpushare-controller-*.rpm)

say() { echo "[rpm] $*"; }
fail() { say "error: $*"; exit 1; }
has() { grep -qxF -- "$2" <<<"$1" || fail "$3 lacks $2"; }

say "what they ask for, run and hold"
requires=$(rpm -qp --requires "$node" "$controller" 2>/dev/null)
has "$requires" munge "the requirements"
has "$requires" /usr/bin/python3.12 "the requirements"
has "$requires" "slurm-gpushare = $(rpm -qp --qf '%{VERSION}' "$node" 2>/dev/null)" "the requirements"
! grep -E '^(lib.*\.so|python\()' <<<"$requires" || fail "the libraries inside became requirements"
files=$(rpm -qpl "$node" "$controller" 2>/dev/null)
for path in /usr/bin/gpushare /usr/lib/slurm-gpushare/bin/python /usr/lib/systemd/system/gpushare-{backfill,watchdog,metrics}.service \
  /usr/lib/systemd/system/gpushare-{watchdog,metrics}.timer /usr/share/man/man1/gpushare.1.gz /usr/share/man/man5/gpushare.conf.5.gz \
  /usr/share/bash-completion/completions/gpushare /usr/share/doc/slurm-gpushare/examples/gpushare.conf \
  /usr/share/doc/slurm-gpushare/slurm-gpushare.cdx.json /usr/lib/slurm-gpushare/common/slurm_gpushare/__init__.py \
  /usr/lib/slurm-gpushare/lib/python3.12/site-packages/numpy/__init__.py; do
  has "$files" "$path" "the file list"
done
[[ -z $(sort <<<"$files" | uniq -d | grep -v '^/usr/lib/slurm-gpushare' || true) ]] || fail "both packages hold one file"
rpm -qp --qf '[%{FILEUSERNAME}:%{FILEGROUPNAME}\n]' "$node" "$controller" 2>/dev/null | sort -u | grep -qx root:root || fail "a file is not root's"
for package in "$node" "$controller"; do
  rpm -qp --scripts "$package" 2>/dev/null | grep -v '^[a-z]* scriptlet' | sh -n || fail "a script of $package is no shell"
done

[[ -e $cache/.complete ]] || fail "no clean Debian 13 in the cache: run 'packaging/try_packages.sh trixie $dist' first"
top=$(mktemp -d /tmp/gs-XXXXXX)
root=$top/root
trap 'umount -q "$root/proc" || true; rm -rf --one-file-system "$top"' EXIT
cp -a "$cache" "$root"
mount --bind /proc "$root/proc"
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"; }
at_root() { rpm --root "$root" --dbpath /var/lib/rpm "$@"; }
listed() { (cd "$root" && find usr etc opt srv -xdev | sort); }
inside useradd -r -U slurm
listed >"$top/before"

say "install"
at_root -i --nodeps --ignorearch "$node" "$controller"
[[ -x $root/usr/bin/gpushare && -L $root/usr/lib/slurm-gpushare/bin/python ]] || fail "the command is missing"
[[ $(stat -c %a "$root/var/lib/gpushare") == 700 ]] || fail "/var/lib/gpushare is open"
at_root -V --nodeps slurm-gpushare slurm-gpushare-controller || fail "an installed file differs from its package"

say "upgrade: the same once more"
at_root -U --nodeps --ignorearch --replacepkgs "$node" "$controller"
at_root -V --nodeps slurm-gpushare slurm-gpushare-controller || fail "an upgraded file differs from its package"

say "remove: nothing stays but what was learned"
at_root -e --nodeps slurm-gpushare-controller slurm-gpushare
listed >"$top/after"
diff "$top/before" "$top/after" || fail "these files stayed (>) or went (<)"
[[ -d $root/var/lib/gpushare ]] || fail "what was learned went too"
say "ok"
