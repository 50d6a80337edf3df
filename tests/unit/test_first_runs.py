"""First runs that still wait when their workload is known: they become sharers where they stand in the queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from world import NOW, TOKEN_A, TOKEN_B, FakeSlurm, Flat, job, node

from slurm_gpushare.helper.changes import conversions, convertible
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.store import Store

WAITING = f"GS1:probe;t={TOKEN_A};o=gpu:1;m=10"
SAID = f"gpushare:{TOKEN_A},max=10"


def test_only_the_tag_changes_and_only_while_it_waits() -> None:
    (waiting,) = convertible([job("7", tag=WAITING)])
    ((_, change),) = conversions([waiting], {"7": SAID}, lambda token, uid: 2)
    assert change.fields == {"Account": "science", "AdminComment": f"GS1:c=2;t={TOKEN_A};o=gpu:1;m=10"}


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "RUNNING"},
        {"per_node": "gres/gpu:2"},
        {"per_node": "", "per_job": "gres/gpu:1"},
        {"tag": f"GS1:probe;t={TOKEN_A}"},
        {"tag": f"GS1:c=1;t={TOKEN_A};o=gpu:1"},
    ],
    ids=["started", "two GPUs since", "as one for the job since", "a form that cannot be changed", "a sharer"],
)
def test_others_stay_what_they_are(changes: dict[str, str]) -> None:
    assert convertible([job("7", **{"tag": WAITING, **changes})]) == []


@pytest.mark.parametrize("comment", ["", "grant 7", f"gpushare:{TOKEN_B}", "gpushare:nonsense"])
def test_who_has_taken_the_token_off_meanwhile_is_not_shared(comment: str) -> None:
    assert conversions([job("7", tag=WAITING)], {"7": comment}, lambda token, uid: 2) == []


def test_the_rest_of_an_array_shares_once_its_first_tasks_were_measured(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    config = parse_config(f"Partitions=gpu\nGpusPerNode=2\nStoreUrl={url}\nSpoolDir={tmp_path}\nStateDir={tmp_path}\n")
    tasks = [job(f"7_{task}", tag=WAITING) for task in range(6)]
    theirs = job("8", uid=2000, tag=WAITING)
    slurm, now_s = FakeSlurm([*tasks, theirs], [node()], comment=SAID), [float(NOW)]
    with Store.create(url) as store:
        helper = Helper(config, slurm, store, Flat(0.9), clock=lambda: now_s[0])
        helper.tick()
        assert slurm.written == [], "nothing is known of it yet"
        enter_profiles(store, [KnownProfile(TOKEN_A, 1000, "V100", 2000, 16384, 1, 900)])
        for _ in range(2):
            now_s[0] += 5.0
            helper.tick()
    assert {key for _, key in slurm.written} == {item.key for item in tasks}, "nobody else's"
    tags = [slurm.queue[item.key].tag for item in tasks]
    assert all(tag and not tag.probe and tag.original == "gpu:1" and tag.max_isd_pct == 10 for tag in tags)
    assert {tag.placed for tag in tags if tag and tag.placed} == {"n0:0", "n0:1"}
    halves = [shard.count for item in tasks if (shard := slurm.queue[item.key].shard)]
    assert set(halves) == {1}, "placed as sharers are"
    assert slurm.queue["8"].tag == Tag(probe=True, token=TOKEN_A, original="gpu:1", max_isd_pct=10)
