"""Words on the command line that name jobs and users."""

from __future__ import annotations

import pytest

from slurm_gpushare.cli.console import check_accounting_names
from slurm_gpushare.cli.main import main
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.values import check_job_ids


def test_job_ids_are_taken_as_squeue_prints_them() -> None:
    assert check_job_ids(["14", "6_2,15", "7+1"]) == ["14", "6_2", "15", "7+1"]
    assert check_job_ids(["6_[0,3-4%2],9"]) == ["6_0", "6_3", "6_4", "9"]


@pytest.mark.parametrize("word", ["", "abc", "6_[", "6_[]", "6_[1-9...]", "6_[0-99999999999]", "1.batch", "-1"])
def test_what_is_no_job_id_is_refused(word: str) -> None:
    with pytest.raises(BadInput, match="is no job id"):
        check_job_ids([word])


def accounting(answer: str) -> Slurm:
    return Slurm(lambda argv: answer)


def test_an_account_that_there_is_not_is_a_mistake_unless_accounts_are_hidden() -> None:
    check_accounting_names(accounting("lab_a\nlab_b\n"), "account", "lab_b")
    with pytest.raises(BadInput, match="there is no account 'nosuch'"):
        check_accounting_names(accounting("lab_a\nlab_b\n"), "account", "lab_b,nosuch")
    check_accounting_names(accounting(""), "account", "nosuch")


def test_my_jobs_and_somebody_elses_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["jobs", "--me", "-u", "nobody"])
    assert stop.value.code == 2
    assert "exclude each other" in capsys.readouterr().err
