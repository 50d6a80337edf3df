"""The report's page in a real browser: it fits, on a desk and on a phone, and follows light and dark."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from slurm_gpushare.report.page import KnowledgeCells, ProfilePoint, render
from slurm_gpushare.report.summary import Promise, summarise
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.tag import Tag
from slurm_gpushare.store.sharing import Span

T0 = 1_790_000_000
WIDTHS = {"desk": 1280, "phone": 390}
SCHEMES = {"light": 1, "dark": 0}  # Blink's numbers


def job(raw_id: int, start: int, end: int, cluster: int) -> AccountedJob:
    return AccountedJob(
        raw_id=raw_id, key=str(raw_id), cluster="c", uid=1000, user=f"user{raw_id % 3}", account="acc", partition="gpu",
        qos="normal", state="COMPLETED", submit_s=T0 + start, eligible_s=T0 + start, start_s=T0 + start, end_s=T0 + end,
        elapsed_s=end - start, limit_s=None, cpus=1, nodes=("gpu0",), gpus=0, shards=1, admin_comment="",
        tag=Tag(cluster=cluster),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    """Twelve pairs on four GPUs."""
    jobs, spans = [], []
    for number in range(12):
        start = number // 4 * 1000
        resident, guest = 2 * number + 1, 2 * number + 2
        jobs += [job(resident, start, start + 900, 0), job(guest, start + 100, start + 800, 1 + number % 2)]
        card = (f"gpu{number % 2}", number // 2 % 2, "V100")
        spans.append(
            Span(resident, guest, "gs-r", "gs-g", *card, T0 + start + 100, T0 + start + 800, 0.8, 0.7, 0.75, 0.6)
        )
    report = summarise(jobs, spans, [], Promise(25, 50), T0, T0 + 4000)
    points = [ProfilePoint(20 * i, 15 * i, i % 3) for i in range(1, 5)]
    return render(report, points, [KnowledgeCells("V100", [[5.0, None], [40.0, 90.0]])])


def chromium(tmp_path: Path, *arguments: str) -> str:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium: run scripts/setup.sh")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}/profile",
        "--hide-scrollbars", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", WIDTHS)
def test_the_page_is_drawn_in_the_readers_colours(page: str, tmp_path: Path, device: str, scheme: str) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(page)
    chromium(
        tmp_path,
        f"--window-size={WIDTHS[device]},900",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--screenshot={picture}",
        file.as_uri(),
    )
    image = Image.open(picture).convert("L")
    paper = image.getpixel((2, 2))
    assert isinstance(paper, int)
    assert (paper > 200) == (scheme == "light")
    assert len(image.getcolors(65536) or []) > 30, "an empty page has few shades"


@pytest.mark.parametrize("device", WIDTHS)
def test_nothing_sticks_out_sideways(page: str, tmp_path: Path, device: str) -> None:
    frame = f'<iframe id="f" width="{WIDTHS[device]}" height="900" srcdoc="{html.escape(page)}"></iframe>'
    script = (
        "<script>f.onload = () => { const d = f.contentDocument.documentElement;"
        " const pictures = d.querySelectorAll('svg').length;"
        " document.title = d.scrollWidth + ' of ' + d.clientWidth + ', pictures ' + pictures }</script>"
    )
    file = tmp_path / "frame.html"
    file.write_text(f"<!doctype html><title></title>{frame}{script}")
    dom = chromium(tmp_path, "--window-size=1400,1000", "--virtual-time-budget=3000", "--dump-dom", file.as_uri())
    found = re.search(r"<title>(\d+) of (\d+), pictures (\d+)</title>", dom)
    assert found is not None
    assert int(found[1]) <= int(found[2])
    assert int(found[3]) == 5
