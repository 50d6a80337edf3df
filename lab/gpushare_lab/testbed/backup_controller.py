"""A backup controller beside a testbed's own: on the same machine, in namespaces with a host name of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.services import SLURMD
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError

HOST, ADDRESS = "ctl2", "127.0.0.2"
TAKES_OVER_S = 5


def there(argv: Sequence[str]) -> list[str]:
    """The command on a machine that is called as the backup controller's."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {HOST}; exec "$@"', "sh", *argv]


@contextmanager
def backup_controller(testbed: Testbed) -> Iterator[None]:
    """slurm.conf names both until the end."""
    hosts = f"{socket.gethostname()}(127.0.0.1)\nSlurmctldHost={HOST}({ADDRESS})"
    keys = {"SlurmctldHost": hosts, "SlurmctldTimeout": str(TAKES_OVER_S), "CommunicationParameters": "NoCtldInAddrAny"}
    before = testbed.layout.slurm_conf.read_text()
    testbed.configure(slurm=keys)
    _restart_nodes(testbed)
    # Its own names of hosts, and a place for its pid file: slurmctld ends whom it finds in there.
    own, names = testbed.layout.slurm_run, testbed.layout.run / "hosts"
    script = (
        f"mount -t tmpfs -o mode=777 own {own}; (cat /etc/hosts; echo {ADDRESS} {HOST}) >{names}; "
        f"mount --bind {names} /etc/hosts; hostname {HOST}; exec slurmctld -D -i"
    )
    argv, env = testbed.command(["unshare", "--uts", "--mount", "sh", "-c", script])
    with (testbed.layout.log / "backup-controller.err").open("ab") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd="/")
    try:
        if not wait_until(lambda: pinged(testbed).get(HOST, False), 60):
            raise GpushareError(f"the backup controller does not come up: see {log.name}")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        testbed.layout.slurm_conf.write_text(before)
        testbed.restart("slurmctld")
        _restart_nodes(testbed)


def _restart_nodes(testbed: Testbed) -> None:
    """They too must know the controllers. A backup of 24.11 may have drained them, for shards that it did not know."""
    nodes = [daemon for name, daemon in testbed.daemons().items() if name.startswith(SLURMD)]
    for daemon in nodes:
        daemon.stop()
    for daemon in nodes:
        daemon.start()

    def up() -> bool:
        resume_nodes(testbed)
        time.sleep(1.0)
        return all(daemon.ready() for daemon in nodes)

    if not wait_until(up, 180):
        raise GpushareError("the nodes do not come back")


def resume_nodes(testbed: Testbed) -> None:
    names = ",".join(testbed.state.shape.node_names)
    testbed.run(["scontrol", "update", f"nodename={names}", "state=resume"], check=False)


def pinged(testbed: Testbed) -> dict[str, bool]:
    """Which controllers are up, by host."""
    lines = testbed.run(["scontrol", "ping"], check=False).stdout.splitlines()
    words = [line.split() for line in lines if line.startswith("Slurmctld(")]
    return {line[2]: line[-1] == "UP" for line in words}
