"""An administrator's afternoon: from a Slurm without us to the first shared job, an upgrade, and back, byte for byte.

``afternoon.py DIST [SUITE [EARLIER]]``: DIST holds the Debian packages (make dist), EARLIER those of a release that is
upgraded from and gone back to while jobs wait and share. All of it happens on a throw-away Slurm, in a copy of that
Debian; needs root. Without EARLIER the same is done once more by Ansible, where build/ansible-env has it. Exit code 1
at the first step that does not do what docs/admin-guide.md says.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gpushare_lab.experiment.submitting import show, submit, wait_for
from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.environment import daemon_env
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.reset import idle_nodes
from gpushare_lab.testbed.rootfs import root_of
from gpushare_lab.testbed.scripts import script_with_environment, write_executable
from gpushare_lab.testbed.testbed import Testbed

GPUSHARE = "/usr/bin/gpushare"
USER = "games"
WORKLOAD = f"{shlex.quote(sys.executable)} -m gpushare_lab.job.workload"
# After one run of each, the long one must have room in its promise for the short one at its longest.
LONG_S, SHORT_S = 100, 10
LIMIT = "gres/gpu=1"
HERE = Path(__file__).resolve().parents[1]
PLAYBOOKS, ANSIBLE = HERE / "packaging/ansible", HERE / "build/ansible-env/bin/ansible-playbook"
BEGUN = time.monotonic()


def say(step: str) -> None:
    print(f"[{time.monotonic() - BEGUN:5.0f} s] {step}", flush=True)


def chroot(root: Path, *command: str) -> str:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["chroot", root, *command], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"afternoon: error: {' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout


def install(root: Path, debs: Sequence[Path]) -> None:
    (root / "packages").mkdir(exist_ok=True)
    for deb in debs:
        shutil.copy(deb, root / "packages")
    chroot(root, "dpkg", "--force-unsafe-io", "--force-downgrade", "-i", *(f"/packages/{deb.name}" for deb in debs))
    shutil.rmtree(root / "packages")


def newer(deb: Path, work: Path) -> Path:
    """The same package under the next version."""
    version = subprocess.run(
        ["dpkg-deb", "-f", deb, "Version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    tree = work / deb.stem
    subprocess.run(["dpkg-deb", "-R", deb, tree], check=True)
    control = tree / "DEBIAN/control"
    text = control.read_text().replace(f"Version: {version}", f"Version: {version}+next")
    control.write_text(text.replace(f"(= {version})", f"(= {version}+next)"))
    made = work / f"{deb.stem}.next.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, made], check=True, capture_output=True)
    shutil.rmtree(tree)
    return made


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Afternoon:
    """The site, its administrator's commands, and its user's."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.etc = bed.layout.etc
        self.ours = bed.layout.gpushare

    def gpushare(
        self, *arguments: str, user: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.bed.run([GPUSHARE, *arguments], user=user, check=check, timeout_s=300)

    def restart(self) -> None:
        """slurmctld, then the slurmds: types of GPUs change only so."""
        for name in ("slurmctld", *(f"slurmd-{node}" for node in self.bed.shape.node_names)):
            self.bed.restart(name)
        idle_nodes(self.bed)

    def site_paths(self) -> None:
        """What a site with directories of its own writes into gpushare.conf before anything else."""
        text = "".join(f"{key}={value}\n" for key, value in self.settings().items())
        self.bed.layout.gpushare_conf.write_text(text)

    def settings(self) -> dict[str, str]:
        """Keys of gpushare.conf that are not as usual here."""
        return {
            "StoreUrl": f"sqlite:///{self.ours}/store.sqlite",
            "HookFile": f"{self.ours}/hook.sqlite",
            "SpoolDir": f"{self.ours}/spool",
            "StateDir": f"{self.ours}/state",
            "PublicDir": f"{self.ours}/public",
            "MungeSocket": str(self.bed.layout.munge_socket),
            "TickSeconds": "1",
            "SampleSeconds": "0.2",
        }

    def own_prologs(self) -> None:
        """Emulated cards need an environment: a site with prologs of its own, which call ours as configure says."""
        for name in ("prolog", "epilog"):
            dropped_in = self.etc / f"{name}.d/50-gpushare"
            until_then = f"[ -e {dropped_in} ] || exit 0\n"
            text = script_with_environment(daemon_env(self.bed.layout), dropped_in, until_then)
            write_executable(self.bed.layout.bin / f"site_{name}", text)

    def limit(self) -> str:
        """The limit that the site has on GPUs, as sacctmgr prints it."""
        return self.bed.run(["sacctmgr", "-n", "-P", "show", "qos", "normal", "format=GrpTRES"]).stdout.strip()

    def limits_first(self) -> None:
        """What limits.gpushare says: two lines and a restart, then its commands; no node has shards yet."""
        text = (self.etc / "limits.gpushare").read_text()
        # An earlier release did not say which lines come first.
        before = {"GresTypes": "gpu,shard", "AccountingStorageTRES": "gres/gpu,gres/shard"}
        keys = dict(re.findall(r"(?m)^#   (\w+)=(\S+)$", text)) or before
        conf = self.bed.layout.slurm_conf
        conf.write_text(with_keys(conf.read_text(), keys))
        self.bed.restart("slurmctld")
        idle_nodes(self.bed)
        for line in text.splitlines():
            if not line.startswith("#"):
                command, *words = line.split()
                self.bed.run([command, "-i", *words])

    def merge(self) -> None:
        """What an editor does with slurm.conf.gpushare and gres.conf.gpushare."""
        added = (self.etc / "slurm.conf.gpushare").read_text()
        keys = dict(line.split("=", 1) for line in added.splitlines() if line and not line.startswith("#"))
        keys |= {key: f"{self.bed.layout.bin}/site_{key.lower()}" for key in ("Prolog", "Epilog")}
        node = re.search(r"(?m)^#   (Gres=\S+ Feature=\S+)$", added)
        assert node is not None, added
        conf = self.bed.layout.slurm_conf
        text = re.sub(r"(?m)^(NodeName=.*?) Gres=\S+", rf"\1 {node[1]}", conf.read_text())
        conf.write_text(with_keys(text, keys))
        (self.etc / "gres.conf").write_text((self.etc / "gres.conf.gpushare").read_text())

    def helper(self) -> subprocess.Popen[bytes]:
        argv, env = self.bed.command([GPUSHARE, "backfill"], user=self.bed.slurm_user)
        with (self.bed.layout.log / "backfill.log").open("ab") as log:
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        if not wait_until(lambda: self.gpushare("doctor", check=False).returncode == 0, 90):
            sys.exit(
                "afternoon: error: doctor with the helper running:\n" + self.gpushare("doctor", check=False).stdout
            )
        return process

    def train(self, name: str, seconds: int) -> int:
        """A user's job with a token. Its limit is not far above what it takes: beside a single run a limit counts."""
        script = (
            "#!/bin/sh\nexport GPUSHARE_EMU_NODE=$SLURMD_NODENAME\n"
            f"exec {WORKLOAD} --work-s {seconds} --gpu-util 30 --mem-access 10\n"
        )
        limit = f"--time={1 + seconds // 30}"
        options = ["--gres=gpu:v100:1", f"--comment=gpushare:{name}", "--output=/dev/null", "--mem=100", limit]
        return submit(self.bed, script, *options, user=USER, cwd=self.bed.layout.home / USER)

    def card(self, job: int) -> str:
        shown = show(self.bed, job)
        return f"{shown['JobState']} {shown.get('NodeList')} {shown.get('GRES')}"


def afternoon(root: Path, bed: Testbed, debs: Sequence[Path], work: Path, later: Sequence[Path] | None = None) -> None:
    """Everything with `debs`. With `later` ones the upgrade is to these and back, while jobs wait and share."""
    site = Afternoon(bed)
    before = contents(site.etc)
    bed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", f"GrpTRES={LIMIT}"])
    say("a user's job before us")
    plain = submit(bed, "true", "--gres=gpu:v100:1", "--output=/dev/null", user=USER, cwd=bed.layout.home / USER)
    wait_for(bed, plain, ["COMPLETED"])

    say("install the packages")
    install(root, debs)
    print("        " + site.gpushare("--version").stdout.strip())

    say("configure")
    site.site_paths()
    written = site.gpushare("configure", "-p", "gpu", "--write", str(site.etc), "--yes").stdout
    print("        " + written.strip().splitlines()[-1])
    site.own_prologs()
    saved = contents(site.etc)

    if (site.etc / "limits.gpushare").exists():
        say("limits come before sharing: slurmctld counts shards, then sacctmgr limits them")
        site.limits_first()
        print(f"        GrpTRES of QOS normal: {site.limit()}")
        if site.limit() != f"{LIMIT},gres/shard=2":
            sys.exit("afternoon: error: the limit on GPUs has no equivalent in shards")

    say("roll out: new types on empty nodes, a store, doctor --first-time")
    site.merge()
    site.restart()
    site.gpushare("db", "migrate", user=bed.slurm_user)
    first = site.gpushare("doctor", "--first-time", check=False, user=bed.slurm_user)
    if first.returncode:
        sys.exit(f"afternoon: error: doctor --first-time:\n{first.stdout}{first.stderr}")
    print("        " + first.stdout.strip().splitlines()[-1])
    helper = site.helper()
    try:
        share_first_job(site)
        if later is None:
            helper = upgrade(root, site, helper, [newer(deb, work) for deb in debs])
        else:
            helper = there_and_back(root, site, helper, debs, later)
    finally:
        helper.terminate()
        helper.wait(60)

    say("roll back: release, our lines out of slurm.conf and gres.conf, restart, configure --undo, remove the packages")
    site.gpushare("release", user=bed.slurm_user)
    for name in ("slurm.conf", "gres.conf"):
        (site.etc / name).write_bytes(saved[name])
    site.restart()
    site.gpushare("configure", "--undo", str(site.etc))
    chroot(root, "dpkg", "-P", "slurm-gpushare-controller", "slurm-gpushare")
    bed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "GrpTRES=gres/shard=-1"])
    bed.layout.gpushare_conf.unlink()  # the site's own, from before configure
    if later is not None:  # it was put back by hand on the way back, so that --undo left it and its copy alone
        shutil.rmtree(site.etc / "gpushare-backup")
    compare(before, site)


class Playbooks:
    """ansible-playbook on the machine, its tasks inside the throw-away Slurm, whose daemons are restarted from here."""

    def __init__(self, root: Path, site: Afternoon, work: Path) -> None:
        self.site, self.work, self.bed = site, work, site.bed
        self.ask, self.answer = (site.bed.layout.run / f"restart.{name}" for name in ("ask", "answer"))
        restart = site.bed.layout.bin / "restart"
        write_executable(restart, f'#!/bin/sh\necho "$*" >{self.ask}; read -r said <{self.answer}; [ "$said" = ok ]\n')
        write_executable(work / "inside", f'#!/bin/sh\nexec {site.bed.layout.bin}/enter /bin/sh "$@"\n')
        write_executable(work / "chroot", f'#!/bin/sh\nexec chroot {root} /bin/sh "$@"\n')
        prologs = {key: f"{site.bed.layout.bin}/site_{key.lower()}" for key in ("Prolog", "Epilog")}
        host = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_shell_executable": "/bin/sh",
            "ansible_python_interpreter": "/usr/bin/python3",
            "gpushare_etc": str(site.etc),
            "gpushare_settings": site.settings(),
            "gpushare_slurm_conf": prologs,
            "gpushare_state_dir": str(site.ours / "state"),
            "gpushare_spool_dir": str(site.ours / "spool"),
            "gpushare_user": site.bed.slurm_user,
            "gpushare_systemd": False,
            "gpushare_restart_slurmctld": f"{restart} slurmctld",
            "gpushare_restart_slurmd": f"{restart} {' '.join(f'slurmd-{name}' for name in site.bed.shape.node_names)}",
        }
        groups = ("slurm_controllers", "slurm_nodes", "slurm_logins")
        inventory = {name: {"hosts": {"here": host}} for name in groups}
        self.changed: list[str] = []
        (work / "inventory.json").write_text(json.dumps(inventory))

    def serve(self) -> None:
        """Restart what is asked for, until the fifo is gone."""
        while names := self.ask.read_text().split():
            for name in names:
                if name == "slurmctld":
                    self.bed.restart(name)
                    continue
                self.bed.stop(name)  # a drained node is ready too
                self.bed.daemons()[name].start()
                node = name.removeprefix("slurmd-")
                wait_until(lambda node=node: not show_node(self.bed, node) & NOT_THERE, 180)
            self.answer.write_text("ok\n")

    def run(self, playbook: str, *options: str, shell: str = "inside") -> int:
        """How many tasks changed something; exits where one failed."""
        env = self.bed.env | {
            "ANSIBLE_EXECUTABLE": str(self.work / shell),
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_CONFIG": str(PLAYBOOKS / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "HOME": str(self.work),
            "PATH": f"{self.bed.layout.bin}:/usr/sbin:/usr/bin:/sbin:/bin",  # the packages' command, not the checkout's
        }
        argv = [ANSIBLE, "-i", self.work / "inventory.json", PLAYBOOKS / playbook, *options]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        recap = re.search(r"(?m)^here .* changed=(\d+)", done.stdout)
        self.changed = re.findall(r"(?m)^TASK \[(.*?)\].*\n(?:(?!TASK).*\n)*?changed:", done.stdout)
        if done.returncode or recap is None:
            sys.exit(f"afternoon: error: {playbook}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}")
        return int(recap[1])


NOT_THERE = {"NOT_RESPONDING", "DOWN", "UNKNOWN"}


def show_node(bed: Testbed, node: str) -> set[str]:
    """A node's state, as its words."""
    found = re.search(r"State=(\S+)", bed.run(["scontrol", "show", "node", node]).stdout)
    return set(found[1].split("+")) if found else NOT_THERE


def with_ansible(root: Path, bed: Testbed, debs: Sequence[Path], work: Path) -> None:
    """The same once more by packaging/ansible: installed, run twice, and removed."""
    site = Afternoon(bed)
    site.own_prologs()
    prologs = {key: f"{bed.layout.bin}/site_{key.lower()}" for key in ("Prolog", "Epilog")}
    bed.layout.slurm_conf.write_text(with_keys(bed.layout.slurm_conf.read_text(), prologs))
    site.restart()
    before = contents(site.etc)
    books = Playbooks(root, site, work)
    os.mkfifo(books.ask)
    os.mkfifo(books.answer)
    restarts = threading.Thread(target=books.serve, daemon=True)
    restarts.start()

    say("Ansible: install the packages")
    (root / "packages").mkdir()
    for deb in debs:
        shutil.copy(deb, root / "packages")
    names = json.dumps({"gpushare_packages": [f"/packages/{deb.name}" for deb in debs]})
    changed = [books.run("site.yml", "--tags", "install", "-e", names, shell="chroot") for _ in range(2)]
    shutil.rmtree(root / "packages")
    print(f"        tasks that changed something: {changed[0]}, the second time {changed[1]}")

    say("Ansible: site.yml")
    changed += [books.run("site.yml", "--skip-tags", "install") for _ in range(2)]
    print(f"        tasks that changed something: {changed[2]}, the second time {changed[3]}")
    if changed[1] or changed[3] or site.limit() != f"{LIMIT},gres/shard=2":
        sys.exit(
            f"afternoon: error: a second run changes something, or limits are wrong: {books.changed}, {site.limit()}"
        )
    helper = site.helper()
    helper.terminate()
    helper.wait(60)
    print("        doctor: nothing fails")

    say("Ansible: remove.yml")
    books.run("remove.yml")
    books.ask.write_text("")
    restarts.join(10)
    chroot(root, "dpkg", "-P", "slurm-gpushare-controller", "slurm-gpushare")
    compare(before, site)


def compare(before: dict[str, bytes], site: Afternoon) -> None:
    if site.limit() != LIMIT:
        sys.exit(f"afternoon: error: the limit is {site.limit()}, and was {LIMIT}")
    after = contents(site.etc)
    if before != after:
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        sys.exit(f"afternoon: error: not as before: {', '.join(changed)}")
    bed = site.bed
    plain = submit(bed, "true", "--gres=gpu:v100:1", "--output=/dev/null", user=USER, cwd=bed.layout.home / USER)
    wait_for(bed, plain, ["COMPLETED"])
    say(f"{len(after)} files of the configuration are as before, byte for byte")


def upgrade(
    root: Path, site: Afternoon, helper: subprocess.Popen[bytes], debs: Sequence[Path]
) -> subprocess.Popen[bytes]:
    """As the guide says; returns the new helper."""
    say("upgrade")
    install(root, debs)
    site.gpushare("configure", "-p", "gpu", "--write", str(site.etc), "--yes")
    site.gpushare("db", "migrate", user=site.bed.slurm_user)
    helper.terminate()
    helper.wait(60)
    helper = site.helper()
    print(f"        {site.gpushare('--version').stdout.strip()}; doctor: nothing fails")
    return helper


def there_and_back(
    root: Path, site: Afternoon, helper: subprocess.Popen[bytes], debs: Sequence[Path], later: Sequence[Path]
) -> subprocess.Popen[bytes]:
    """Up to `later` and back to `debs`, each time with two jobs on the card and one that waits; none is lost."""
    backup, settings = site.ours / "before.backup", ""
    for back in (False, True):
        say(f"jobs that share and one that waits, {'back to the earlier release' if back else 'upgrade'}")
        jobs = [site.train("long-one", LONG_S)]
        wait_for(site.bed, jobs[0], ["RUNNING"], timeout_s=120)
        jobs.append(site.train("short-one", SHORT_S + 20))
        wait_for(site.bed, jobs[1], ["RUNNING"], timeout_s=60)
        jobs.append(site.train("short-one", SHORT_S))
        if not back:
            site.gpushare("db", "backup", str(backup), user=site.bed.slurm_user)
            settings = site.bed.layout.gpushare_conf.read_text()
            helper = upgrade(root, site, helper, later)
        else:
            helper.terminate()
            helper.wait(60)
            install(root, debs)
            site.bed.layout.gpushare_conf.write_text(settings)
            site.gpushare("configure", "-p", "gpu", "--write", str(site.etc), "--yes")
            site.gpushare("db", "restore", str(backup), "--yes", user=site.bed.slurm_user)
            helper = site.helper()
        wait_for(site.bed, jobs, ["COMPLETED"], timeout_s=600)
        print(f"        {site.gpushare('--version').stdout.strip()}: {len(jobs)} jobs completed")
    return helper


def known_workloads(site: Afternoon) -> int:
    with closing(sqlite3.connect(f"file:{site.ours}/hook.sqlite?mode=ro", uri=True)) as file:
        return int(file.execute("SELECT COUNT(*) FROM workload").fetchone()[0])


def share_first_job(site: Afternoon) -> None:
    say("two workloads, measured once each")
    for name, seconds in (("long-one", LONG_S), ("short-one", SHORT_S)):
        site.gpushare("token", name, user=USER)
        wait_for(site.bed, site.train(name, seconds), ["COMPLETED"], timeout_s=300)
    if not wait_until(lambda: known_workloads(site) == 2, 90):
        sys.exit("afternoon: error: the measured workloads did not become known")
    time.sleep(3)  # the hook opens its file anew every two seconds
    say("the first shared job")
    resident = site.train("long-one", LONG_S)
    wait_for(site.bed, resident, ["RUNNING"], timeout_s=120)
    guest = site.train("short-one", SHORT_S)
    wait_for(site.bed, guest, ["RUNNING"], timeout_s=60)
    print(f"        {site.card(resident)}; {site.card(guest)}")
    if show(site.bed, resident)["JobState"] != "RUNNING":
        sys.exit("afternoon: error: the guest started only when the resident had ended")
    wait_for(site.bed, [resident, guest], ["COMPLETED"], timeout_s=400)
    print("        " + site.gpushare("report", user=site.bed.slurm_user).stdout.strip().splitlines()[0])


def packages(dist: Path) -> list[Path]:
    debs = sorted(dist.glob("slurm-gpushare*_amd64.deb"), key=lambda path: len(path.name))
    if len(debs) != 2:
        sys.exit(f"afternoon: error: {dist}: {len(debs)} packages. Run 'make dist'.")
    return debs


def main(dist: Path, suite: str, earlier: Path | None) -> None:
    debs = packages(dist)
    original = root_of(suite, say)
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        say(f"a Debian {suite} with Slurm, and no GPU sharing")
        subprocess.run(["cp", "-a", original, f"{top}/{suite}"], check=True)
        os.environ["GPUSHARE_CACHE"] = top
        bed = Testbed(Path(top, "bed")).up(Shape(nodes=1, gpus=1), suite=suite, plain=True)
        try:
            first = packages(earlier) if earlier else debs
            afternoon(Path(top, suite), bed, first, Path(top), debs if earlier else None)
            if not earlier and ANSIBLE.exists():
                with_ansible(Path(top, suite), bed, debs, Path(top))
        finally:
            bed.down(purge=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), (sys.argv[2:] or ["trixie"])[0], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
