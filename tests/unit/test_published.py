"""What the helper publishes: the file for all, owners' own figures, and who reads them where."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from world import ALICE, NOW, record

from slurm_gpushare.helper import publishing
from slurm_gpushare.helper.explain import tell
from slurm_gpushare.helper.publishing import Publisher, own_figures
from slurm_gpushare.node.figures import RunFigures, run_figures
from slurm_gpushare.protocol.history import Decision, Span, isd_of_rate, of_job, rate_of_isd
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.report import sources
from slurm_gpushare.report.sources import PublishedSource, StoreSource
from slurm_gpushare.store import Store, published
from slurm_gpushare.store.credential import Sealed
from slurm_gpushare.store.published import NotPublished, OwnFigures, PublicJob, Published, TokenFigures
from slurm_gpushare.store.stored_jobs import EVER

SPAN = Span(1, 2, "", "", "n0", 0, "V100", 100, None, 0.9, 0.8, None, 0.7)
OWN = OwnFigures(
    at_s=NOW,
    since_s=NOW - 100,
    live=(PublicJob("7_1", 9, "n0:0", 3, 12.5, None),),
    spans=(SPAN,),
    decisions=(Decision(1, 100, "waits", reasons={"key": "1", "code": "memory"}),),
    runs={1: RunFigures("V100", 60, gpu_busy_pct=40)},
    tokens=(TokenFigures("gs-a", 2, 1, 60.0, 4000, "V100", 100),),
)
STORY = ("waits", "alone", "taken-back", "waits")


@pytest.fixture
def unsealed(tmp_path: Path) -> Path:
    """A directory whose owners' files are not sealed: munge is tried on a real cluster."""
    with (
        patch.object(published, "seal", lambda text, socket, reader_uid: text),
        patch.object(published, "opener", lambda socket: lambda raw: Sealed(tmp_path.stat().st_uid, raw)),
    ):
        published.write_own(tmp_path, ALICE, published.own_text(OWN), None)
        yield tmp_path  # type: ignore[misc]


def test_the_file_for_all_is_read_back_as_it_was(tmp_path: Path) -> None:
    told = Published(NOW, False, {"jobs": 2}, (PublicJob("7_1", 9, "n0:0", 3, 12.5), PublicJob("8", 8, paused=True)))
    published.write_public(tmp_path, told)
    assert published.read_public(tmp_path) == told
    assert (tmp_path / published.PUBLIC).stat().st_mode & 0o777 == 0o644


def test_a_field_of_a_later_release_does_not_disturb(tmp_path: Path) -> None:
    published.write_public(tmp_path, Published(NOW, False, {}, (PublicJob("8", 8),)))
    file = tmp_path / published.PUBLIC
    body = json.loads(file.read_text())
    body["jobs"][0]["mood"] = "good"
    file.write_text(json.dumps(body))
    assert published.read_public(tmp_path).jobs == (PublicJob("8", 8),)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "jobs": 3}', "\x00"])
def test_a_damaged_file_is_news_not_a_crash(tmp_path: Path, text: str) -> None:
    (tmp_path / published.PUBLIC).write_text(text)
    with pytest.raises(NotPublished):
        published.read_public(tmp_path)


def test_an_owners_figures_are_read_back_as_they_were(unsealed: Path) -> None:
    assert published.read_own(unsealed, ALICE, None) == OWN


def test_figures_that_somebody_else_sealed_are_refused(unsealed: Path) -> None:
    liar = Sealed(unsealed.stat().st_uid + 1, b"")
    forged = patch.object(published, "opener", lambda socket: lambda raw: liar)
    with forged, pytest.raises(NotPublished, match="helper"):
        published.read_own(unsealed, ALICE, None)


def test_users_see_their_own_history_and_only_numbers_of_others(unsealed: Path) -> None:
    published.write_public(unsealed, Published(NOW, False, {}, (PublicJob("7_1", 9, expected_isd_pct=12.5),)))
    source = PublishedSource(unsealed, ALICE, None)
    with patch.object(sources.time, "time", lambda: NOW):
        assert source.live().cost[9] == (12.5, None)
        assert source.of_job(1, "1", ALICE).spans == [SPAN]
        assert source.between(0, NOW).spans == [SPAN]
        assert (source.tokens(ALICE) or {})["gs-a"].runs == 2
        source.note = ""
        assert source.of_job(1, "1", ALICE + 1).spans == ()
    assert source.note == "details of a job are for its owner"


@pytest.mark.parametrize("asked", [{ALICE + 1}, {ALICE, ALICE + 1}, set()])
def test_of_other_users_a_user_is_told_that_nothing_is_known_not_that_nobody_shared(
    unsealed: Path, asked: set[int]
) -> None:
    source = PublishedSource(unsealed, ALICE, None)
    source.ask_about(asked)
    assert not source.between(0, NOW).complete
    assert "for administrators" in source.note
    source.ask_about({ALICE})
    assert source.between(0, NOW).complete


def test_a_tasks_decisions_from_before_it_had_its_own_id_are_its_own() -> None:
    early = [Decision(7, 1, "beside", partner_job=n, reasons={"key": f"7_{n}", "wait_s": 60.0}) for n in (1, 2)]
    late = Decision(9, 2, "extended", reasons={"key": "7_1"})
    found = of_job([*early, late], 9, "7_1", 7)
    assert [(d.kind, d.job_id, d.reasons["key"]) for d in found] == [("beside", 9, "7_1"), ("extended", 9, "7_1")]


def test_what_is_unknown_is_noted_for_every_job_of_several(tmp_path: Path) -> None:
    source = PublishedSource(tmp_path, ALICE, None)
    for job in (1, 2):
        source.note = ""
        source.of_job(job, str(job), ALICE)
        assert source.note


def test_where_jobs_are_hidden_only_the_owners_own_are_shown(unsealed: Path) -> None:
    published.write_public(unsealed, Published(NOW, True, {"jobs": 5}))
    source = PublishedSource(unsealed, ALICE, None)
    with patch.object(sources.time, "time", lambda: NOW):
        assert set(source.live().jobs) == {"7_1"}
    assert "hides jobs" in source.note


def test_what_was_published_long_ago_says_nothing_of_now(tmp_path: Path) -> None:
    published.write_public(tmp_path, Published(NOW - 900, False, {}, (PublicJob("8", 8, expected_isd_pct=1),)))
    source = PublishedSource(tmp_path, ALICE, None)
    with patch.object(sources.time, "time", lambda: NOW):
        assert source.live().cost == {}
    assert source.note == "slow-down and reasons are not known: the helper last published 15 min ago"


@pytest.mark.parametrize(
    ("age_s", "stale_s", "said"), [(61, 60, "61 s"), (59, 60, ""), (599, 600, ""), (700, 600, "12 min")]
)
def test_the_helper_says_itself_from_when_on_it_is_to_be_taken_for_dead(
    tmp_path: Path, age_s: float, stale_s: float, said: str
) -> None:
    told = Published(NOW - age_s, False, {}, (PublicJob("8", 8, expected_isd_pct=1),), stale_s=stale_s)
    published.write_public(tmp_path, told)
    with (
        patch.object(sources.time, "time", lambda: NOW),
        Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store,
    ):
        for source in (PublishedSource(tmp_path, ALICE, None), StoreSource(store, tmp_path)):
            assert bool(source.live().jobs) is not bool(said)
            assert source.note.endswith(f"are not known: the helper last published {said} ago") is bool(said)


def test_an_older_release_published_nothing_of_when_it_is_dead(tmp_path: Path) -> None:
    published.write_public(tmp_path, Published(NOW, False, {}, stale_s=60.0))
    file = tmp_path / published.PUBLIC
    body = json.loads(file.read_text())
    del body["stale_s"]
    file.write_text(json.dumps(body))
    assert published.read_public(tmp_path).stale_s == 180.0


@pytest.mark.parametrize(
    ("settings", "write_s", "first_s", "then_s"),
    [
        ("", 0.0, 60, 60),
        ("HeartbeatSeconds=20\n", 0.01, 20, 20.2),
        ("HeartbeatSeconds=20\n", 5.0, 20, 30),
        ("HeartbeatSeconds=20\nTickSeconds=30", 0.0, 60, 60),
    ],
    ids=["as shipped", "a shorter heartbeat", "a file system that stalls", "ticks further apart"],
)
def test_who_reads_waits_as_long_as_the_hook_does_and_for_the_publishers_own_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, write_s: float, first_s: float, then_s: float
) -> None:
    """A helper that is alive is never taken for dead: the file stays good until the next one must be there."""
    clock, written = [0.0], list[Published]()

    def write(directory: Path, told: Published) -> None:
        clock[0] += write_s
        written.append(told)

    monkeypatch.setattr(publishing, "write_public", write)
    monkeypatch.setattr(publishing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    config = replace(parse_config(settings), public_dir=tmp_path)
    publisher = Publisher(None, None)  # type: ignore[arg-type]
    view = SimpleNamespace(jobs={})
    publisher._for_all({}, view, NOW, config, "")  # type: ignore[arg-type]
    pause_s = publisher._next_s - NOW
    publisher._for_all({}, view, NOW + pause_s, config, "")  # type: ignore[arg-type]
    assert [told.stale_s for told in written] == pytest.approx([first_s, then_s])
    assert pause_s <= config.heartbeat_s / 2


def test_without_any_file_the_note_says_which_is_missing(tmp_path: Path) -> None:
    source = PublishedSource(tmp_path, ALICE, None)
    assert not source.between(0, NOW).complete
    assert str(tmp_path) in source.note
    assert source.tokens(ALICE) is None


def test_a_login_node_needs_no_database_to_read_it() -> None:
    """Commands for users import neither numpy nor SQLAlchemy."""
    code = (
        "import sys, slurm_gpushare.cli.status, slurm_gpushare.cli.job, slurm_gpushare.cli.report,"
        " slurm_gpushare.cli.token; print([m for m in ('numpy', 'sqlalchemy', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_record_in_a_few_numbers() -> None:
    figures = run_figures(record(util=50.0, mem_mib=4000.0))
    assert (figures.gpu_mem_peak_mib, figures.gpu_mem_total_mib, figures.power_w) == (4000, 16384, 50)
    assert figures.gpu_busy_pct is None, "this record has no activity: unknown, not nought"
    busy = record()
    assert run_figures(replace(busy, alone=replace(busy.alone, stats=busy.profile.stats))).gpu_busy_pct == 50


def test_an_owner_is_told_the_same_story_as_an_administrator(tmp_path: Path) -> None:
    """Of equal decisions the last is told, where it was made: it waited again after it had been sent somewhere."""
    made = [Decision(7, NOW + at_s, kind, "n0", 0, reasons={"key": "7"}) for at_s, kind in enumerate(STORY)]
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.decisions.add(made)
        own = own_figures(store, ALICE, [PublicJob("7", 7)], NOW, {})
        assert [decision.kind for decision in own.decisions] == ["alone", "taken-back", "waits"]
        assert tell("7", own.decisions) == tell("7", store.decisions.of_jobs({7: EVER}))


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8, 1.0])
def test_rate_and_slow_down_are_each_other_s_way_back(rate: float) -> None:
    assert rate_of_isd(isd_of_rate(rate)) == pytest.approx(rate)
