"""The report's page in a real browser: it fits, on a desk and on a phone, and follows light and dark."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.report.job_view import History
from slurm_gpushare.report.report_page import render_report
from slurm_gpushare.report.summary import summarise
from slurm_gpushare.slurm.accounting import AccountedJob

T0 = 1_790_000_000
WIDTHS = {"desk": 1280, "tablet": 820, "phone": 390}
SCHEMES = {"light": 1, "dark": 0}  # Blink's numbers


def job(raw_id: int, start: int, end: int, cluster: int) -> AccountedJob:
    return AccountedJob(
        raw_id=raw_id, key=str(raw_id), slurm_cluster="c", uid=1000, user=f"franz-josef{raw_id % 3}", account="acc",
        partition="gpu", state="COMPLETED", submit_s=T0 + start, eligible_s=T0 + start,
        start_s=T0 + start, end_s=T0 + end,
        elapsed_s=end - start, limit_s=None, cpus=1, nodes=("gpu0",), gpus=0, shards=1,
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
    report = summarise(jobs, History(spans, complete=True), SitePromises(25, 50), T0, T0 + 4000)
    points = [(20 * i, 15 * i, i % 3, f"cluster {i % 3}") for i in range(1, 5)]
    return render_report(report, points, [("V100", [[5.0, None], [40.0, 90.0]])])


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
        " const seen = [...d.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().width > 0);"
        " const inner = [...d.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1).length;"
        " const small = seen.filter(e => e.getBoundingClientRect().width < 0.9 * e.viewBox.baseVal.width).length;"
        " document.title = d.scrollWidth + ' of ' + d.clientWidth + ', pictures ' + seen.length"
        " + ', scrolling ' + inner + ', shrunk ' + small }</script>"
    )
    file = tmp_path / "frame.html"
    file.write_text(f"<!doctype html><title></title>{frame}{script}")
    dom = chromium(tmp_path, "--window-size=1400,1000", "--virtual-time-budget=3000", "--dump-dom", file.as_uri())
    found = re.search(r"<title>(\d+) of (\d+), pictures (\d+), scrolling (\d+), shrunk (\d+)</title>", dom)
    assert found is not None
    assert int(found[1]) <= int(found[2])
    assert int(found[3]) == 9, "each picture once, at the width that fits"
    assert int(found[4]) == 0, "no table and no picture needs to be moved sideways"
    assert int(found[5]) == 0, "letters keep their size"


def test_it_prints_on_paper(page: str, tmp_path: Path) -> None:
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    file.write_text(page)
    chromium(tmp_path, f"--print-to-pdf={paper}", file.as_uri())
    assert paper.read_bytes().startswith(b"%PDF")


def test_the_keyboard_reaches_what_can_be_opened(page: str) -> None:
    assert "<details" in page
    assert page.count('role="region" tabindex="0"') >= 5


def test_a_screen_reader_has_words_for_every_picture_and_table(page: str, tmp_path: Path) -> None:
    script = (
        "<script>const all = (q) => [...document.querySelectorAll(q)];"
        " const named = (e) => e.getAttribute('aria-label');"
        " const bare = all('svg').filter(e => e.getAttribute('role') != 'img' || !/\\d/.test(named(e))).length;"
        " const tables = all('table').filter(e => !named(e) || e.querySelectorAll('tbody th[scope=row]').length == 0);"
        " const heads = all('h1, h2').map(e => e.tagName).join(' ');"
        " document.title = `bare ${bare}, tables ${tables.length}, ${heads}, ${document.documentElement.lang}`</script>"
    )
    file = tmp_path / "report.html"
    file.write_text(page.replace("</body>", f"{script}</body>"))
    dom = chromium(tmp_path, "--virtual-time-budget=2000", "--dump-dom", file.as_uri())
    found = re.search(r"<title>bare (\d+), tables (\d+), ([H12 ]+), (\w+)</title>", dom)
    assert found is not None
    assert (found[1], found[2], found[4]) == ("0", "0", "en"), "a picture's words have its numbers"
    assert found[3].startswith("H1 H2")
    assert found[3].count("H1") == 1
