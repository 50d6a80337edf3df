"""Changes through an scontrol that stays open, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.runner import JobMovedOn, ScontrolSession


class Watched(ScontrolSession):
    """Remembers what became of each change."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[bool] = []

    def took(self, words: object) -> bool:
        self.outcomes.append(super().took(words))  # type: ignore[arg-type]
        return self.outcomes[-1]


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


@pytest.fixture
def session(site: Site) -> Iterator[Watched]:
    session = Watched()
    with site.environment():
        yield session
    session.close()


def test_changes_arrive_and_refusals_are_told_as_ever(site: Site, session: Watched) -> None:
    slurm = Slurm(session=session)
    job = site.plain("--hold")
    tag = f"GS1:c=2;t=gs-{'a' * 20};o=gpu:1;l=1"  # as long as ours are: a line that is wider than a screen
    slurm.update_job(job, {"Nice": "7", "ReqNodeList": "gpu0", "AdminComment": tag})
    found = site.jobs()[job]
    assert (found.nice, found.wanted_nodes, found.admin_comment) == (7, "gpu0", tag)
    slurm.update_job(job, {"AdminComment": "an administrator's own words"})
    assert site.jobs()[job].admin_comment == "an administrator's own words"
    with pytest.raises(JobMovedOn):
        slurm.update_job("99999", {"Nice": "1"})
    with pytest.raises(SlurmError):
        slurm.update_job(job, {"Partition": "nosuch"})
    slurm.update_job(job, {"Nice": "8"})
    assert site.jobs()[job].nice == 8
    assert session.outcomes == [True, False, False, False, True]


def test_it_outlives_a_restart_of_slurmctld(site: Site, session: Watched) -> None:
    slurm = Slurm(session=session)
    job = site.plain("--hold")
    slurm.update_job(job, {"Nice": "7"})
    site.testbed.restart("slurmctld")
    assert wait_until(lambda: job in site.jobs(), 60)
    slurm.update_job(job, {"Nice": "8"})
    assert site.jobs()[job].nice == 8
