"""The short form of ``make chaos``: faults of each class, while jobs of several users come and go."""

from __future__ import annotations

from gpushare_lab.chaos.faults import FAULTS
from gpushare_lab.chaos.run import Chaos
from gpushare_lab.chaos.stream import KINDS
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.release import parse_release

SHORT = (
    "kill -9 of the helper 5 times",
    "SpoolDir/hold removed",
    "slurmctld restarts",
    "store deleted",
    "gpushare.conf broken",
    "NodeUsers names nobody",
    "GPU lost",
    "Slurm's commands print garbage",
)
BEARABLE = {"slurmctld restarts": "kill -9 of a slurmd"}
"""What stands for a fault of the same class where Slurm itself loses shards at a restart (test_restart.py)."""


def test_faults_lose_no_job_and_no_record(testbed: Testbed) -> None:
    names, kinds = set(SHORT), list(KINDS)
    if not parse_release(testbed.release).can("keeps_whole_gpus_apart"):
        names = {BEARABLE.get(name, name) for name in names}
        kinds.remove("two cards")  # this Slurm itself lets jobs of whole cards beside sharers
    faults = [fault for fault in FAULTS if fault.name in names]
    assert {fault.group for fault in faults} == {fault.group for fault in FAULTS} - {"calm"}
    chaos = Chaos(testbed, faults, 1.8, 0, lambda progress: None, kinds=kinds, mean_s=8.0, pace=0.5)
    books, _ = chaos.run()
    assert {line.fault: line.verdict for line in books.lines} == dict.fromkeys(names, "ok"), books.as_dict()
    assert books.sound, books.as_dict()
    assert books.records > 0
