#!/usr/bin/env bash
# try_packages.sh SUITE DIST: the Debian packages in a clean Debian: installed, used, upgraded, removed, purged.
# Needs root and a Debian mirror. The clean system is made once and kept in the cache (GPUSHARE_CACHE).
set -euo pipefail
suite=$1 dist=$(realpath "$2")
cache=${GPUSHARE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slurm-gpushare}/clean/$suite
mirror=${GPUSHARE_DEBIAN_MIRROR:-http://deb.debian.org/debian}

say() { echo "[$suite] $*"; }

if [[ ! -e $cache/.complete ]]; then
  say "base system from $mirror (once; some minutes)"
  rm -rf "$cache"
  mkdir -p "$cache"
  debootstrap --variant=minbase --include=python3,munge,lua-sql-sqlite3 "$suite" "$cache" "$mirror" >/dev/null
  printf '#!/bin/sh\nexit 101\n' >"$cache/usr/sbin/policy-rc.d" # no daemon starts
  chmod +x "$cache/usr/sbin/policy-rc.d"
  touch "$cache/.complete"
fi

top=$(mktemp -d /tmp/gs-XXXXXX)
root=$top/root
trap 'umount -q "$root/proc" || true; rm -rf --one-file-system "$top"' EXIT
cp -a "$cache" "$root"
mount --bind /proc "$root/proc"
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"; }
files() { (cd "$root" && find usr etc var lib opt home srv root run -xdev ! -path 'var/lib/dpkg/*' ! -path 'var/log/*' ! -path '*/__pycache__*' ! -path 'var/cache/ldconfig/*' | sort); }

inside useradd -r -U slurm
mkdir "$root/packages"
cp "$dist"/*.deb "$root/packages/"
files >"$top/before"

say "install"
inside sh -c 'dpkg --force-unsafe-io -i /packages/*.deb' >/dev/null
inside gpushare --version
inside /usr/lib/slurm-gpushare/bin/python -I -c 'import jinja2, numpy, pymysql, scipy, sklearn, sqlalchemy, sys; print("Python", sys.version.split()[0], "NumPy", numpy.__version__, "SQLAlchemy", sqlalchemy.__version__)'
for path in usr/lib/systemd/system/gpushare-{backfill,watchdog,metrics}.service usr/lib/systemd/system/gpushare-{watchdog,metrics}.timer \
  usr/share/man/man1/gpushare.1.gz usr/share/man/man5/gpushare.conf.5.gz usr/share/bash-completion/completions/gpushare \
  usr/share/zsh/vendor-completions/_gpushare usr/share/fish/vendor_completions.d/gpushare.fish \
  usr/share/doc/slurm-gpushare/examples/gpushare.conf usr/share/doc/slurm-gpushare/examples/train.sh; do
  [[ -s $root/$path ]] || { say "error: /$path is missing"; exit 1; }
done
! grep -rEq '@[A-Z_]+@' "$root/usr/lib/systemd/system/" || { say "error: a unit is not filled in"; exit 1; }

say "configure: a store, as SlurmUser"
mkdir -p "$root/etc/slurm"
printf 'Partitions=gpu\n' >"$root/etc/slurm/gpushare.conf"
inside setpriv --reuid slurm --regid slurm --clear-groups gpushare db migrate
inside setpriv --reuid slurm --regid slurm --clear-groups gpushare db check

say "upgrade"
for package in slurm-gpushare slurm-gpushare-controller; do
  deb=$(ls "$root/packages/${package}"_[0-9]*.deb)
  version=$(dpkg-deb -f "$deb" Version)
  dpkg-deb -R "$deb" "$top/$package"
  sed -i "s/^Version: .*/Version: $version+next/; s/(= $version)/(= $version+next)/" "$top/$package/DEBIAN/control"
  dpkg-deb --root-owner-group -Znone --build "$top/$package" "$root/packages/$package.deb" >/dev/null
  rm -rf "${top:?}/$package" "$deb"
done
inside sh -c 'dpkg --force-unsafe-io -i /packages/*.deb' >/dev/null
[[ $(inside dpkg-query -W -f '${Version}' slurm-gpushare) == *+next ]]
inside setpriv --reuid slurm --regid slurm --clear-groups gpushare db check

say "remove: what was learned stays"
inside dpkg -r slurm-gpushare-controller slurm-gpushare >/dev/null
[[ -s $root/var/lib/gpushare/store.sqlite ]]

say "purge: nothing stays"
inside dpkg -P slurm-gpushare-controller slurm-gpushare >/dev/null
rm -r "$root/etc/slurm"
files >"$top/after"
diff "$top/before" "$top/after" || { say "error: these files stayed (>) or went (<)"; exit 1; }
say "ok"
