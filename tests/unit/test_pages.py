"""Pages that commands write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import check_page, write_page


def test_a_page_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    before = os.umask(0)
    try:
        write_page(page, "who ran what")
        write_page(page, "who ran what since")
    finally:
        os.umask(before)
    assert page.stat().st_mode & 0o777 == 0o600
    assert page.read_text() == "who ran what since"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("page", ["/proc/page.html", "/etc/passwd/page.html"])
def test_a_page_that_cannot_be_written_is_told_before_any_work(page: str) -> None:
    with pytest.raises(GpushareError, match=r"page\.html: cannot be written: "):
        check_page(Path(page), force=False)
    check_page(Path("/dev/null"), force=True)


def test_a_page_may_go_to_a_pipe() -> None:
    write_page(Path("/dev/null"), "nobody reads this")
    assert not Path("/dev/null").is_file()
