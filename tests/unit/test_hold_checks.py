"""Doctor about the hold, and about the right to pause."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurm_gpushare.helper.hold import Board, show_jobs
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import Config, parse_config
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, Level
from slurm_gpushare.site.local_checks import hold_board
from slurm_gpushare.site.script_checks import hold_setup
from slurm_gpushare.site.slurm_checks import pausing
from slurm_gpushare.slurm.nodes import hides_jobs

OURS = {"SlurmUser": "slurm(64030)", "EpilogSlurmctld": "/etc/slurm/gpushare_epilog_slurmctld"}


def setup_findings(settings: str = "", **slurm_conf: str) -> dict[str, Finding]:
    conf = OURS | slurm_conf
    facts = SiteSetup(Release(24, 11, 5), conf, (), (), None, Path("/etc/slurm"), {}, is_controller=False)
    return {finding.check: finding for finding in hold_setup(facts, parse_config(settings))}


def test_a_site_in_order_passes() -> None:
    assert {finding.level for finding in setup_findings().values()} == {Level.PASS}
    assert {finding.level for finding in setup_findings("SlurmUser=64030").values()} == {Level.PASS}


def test_complete_wait_is_named_unless_slurm_is_told_to_go_on() -> None:
    assert "CompleteWait" in setup_findings(CompleteWait="30 sec")["hold"].found
    careful = setup_findings(CompleteWait="30 sec", SchedulerParameters="reduce_completing_frag")
    assert careful["hold"].level is Level.PASS


def test_a_controller_that_does_not_wake_the_helper_is_named() -> None:
    assert setup_findings(EpilogSlurmctld="(null)")["hold"].level is Level.WARN
    assert setup_findings(EpilogSlurmctld="/opt/site/epilog")["hold"].level is Level.WARN


def test_a_hold_that_is_off_needs_nothing() -> None:
    assert setup_findings("EpilogHold=0", EpilogSlurmctld="", CompleteWait="9 sec")["hold"].level is Level.PASS


def test_where_slurm_hides_jobs_the_board_names_none_to_users(tmp_path: Path) -> None:
    for hidden, mode in ((True, 0o700), (False, 0o755)):
        assert hides_jobs({"PrivateData": "accounts,jobs" if hidden else "accounts"}) is hidden
        show_jobs(tmp_path, hidden)
        assert {(tmp_path / "hold" / name).stat().st_mode & 0o777 for name in ("answers", "stops")} == {mode}
        assert (tmp_path / "hold").stat().st_mode & 0o777 == 0o755, "that somebody waits is no secret"


class TestPausing:
    def found(self, settings: str) -> Finding:
        facts = SiteSetup(Release(24, 11, 5), OURS, (), (), None, Path("/etc/slurm"), {})
        (finding,) = pausing(facts, parse_config(settings))
        return finding

    def test_how_much_of_it_there_may_be_is_said(self) -> None:
        assert "at most 5 minutes at a time" in self.found("RecordsTo=store").found
        assert self.found("RecordsTo=store\nOnSlowdown=report").level is Level.PASS


class TestOnANode:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        return parse_config(f"SpoolDir={tmp_path}\nStateDir={tmp_path}\nSlurmUser={os.getuid()}\n")

    def found(self, config: Config) -> Finding:
        (finding,) = hold_board(config)
        return finding

    def test_no_board_no_hold(self, config: Config) -> None:
        assert self.found(config).level is Level.WARN

    def test_a_board_that_can_be_read_passes(self, config: Config) -> None:
        board = Board(config.spool_dir)
        board.open()
        now_ms = round(1000 * time.time())
        board.publish(now_ms, now_ms + 5000)
        assert self.found(config).found == "somebody waits for a card"
        board.publish(now_ms, 0)
        assert self.found(config).found.startswith("nobody waits")

    @pytest.mark.parametrize(("age_s", "said"), [(3600.0, "since 20"), (None, "since it was stopped")])
    def test_a_board_that_no_helper_writes_to_any_more_is_named(
        self, config: Config, age_s: float | None, said: str
    ) -> None:
        """The helper is dead, or this node sees an old file."""
        board = Board(config.spool_dir)
        board.open()
        board.publish(0 if age_s is None else round(1000 * (time.time() - age_s)), 0)
        finding = self.found(config)
        assert finding.level is Level.WARN
        assert f"the helper has not written {said}" in finding.found

    def test_a_board_that_others_can_write_is_a_failure(self, config: Config) -> None:
        board = Board(config.spool_dir)
        board.open()
        board.publish(1, 0)
        board.directory.chmod(0o777)
        assert self.found(config).level is Level.FAIL
