"""The parsers, on what Slurm 22.05, 24.11 and 26.05 really print (see tests/record_fixtures.py for the scene)."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_gpushare.helper.occupancy import GpuAddress, occupancy
from slurm_gpushare.protocol.release import Release, parse_release
from slurm_gpushare.slurm.accounting import parse_accounting
from slurm_gpushare.slurm.nodes import Node, parse_config, parse_nodes, parse_partitions, parse_reservations
from slurm_gpushare.slurm.queue import COMMENT_COLUMNS, Job, QueueReader, parse_queue, parse_texts
from slurm_gpushare.slurm.values import Gres

DELIMITER = "~00000000~"
MARK = "~11111111~"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"


class Recorded:
    """What one release printed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def text(self, question: str) -> str:
        return (FIXTURES / self.name / f"{question}.txt").read_text()

    @property
    def release(self) -> Release:
        return parse_release(self.text("version"))

    @property
    def jobs(self) -> dict[str, Job]:
        return {job.key: job for job in parse_queue(self.text("squeue"), DELIMITER)}

    @property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for node in parse_nodes(self.text("sinfo"), DELIMITER, self.release)}


@pytest.fixture(params=["22.05", "24.11", "26.05"])
def slurm(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def test_release(slurm: Recorded) -> None:
    assert str(slurm.release).startswith(slurm.name)


def test_every_job_and_every_array_task_is_one_row(slurm: Recorded) -> None:
    assert sorted(slurm.jobs) == ["2", "3", "4", "5", "6_1", "6_2", "6_3", "7", "8", "9"]
    task = slurm.jobs["6_2"]
    assert (task.array_id, task.task_id, task.raw_id) == (6, 2, 6)


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [((), ["6_0", "6_4", "6_8", "6_31"]), (("6_8",), ["6_8"]), (("6",), ["6_0", "6_4", "6_8", "6_31"])],
)
def test_the_waiting_tasks_of_an_array_with_a_step_are_told_apart_to_the_last_one(
    slurm: Recorded, wanted: tuple[str, ...], keys: list[str]
) -> None:
    (row,) = [line for line in slurm.text("squeue").split("\n") if f"{DELIMITER}6_1{DELIMITER}" in line]
    fields = row.split(DELIMITER)
    fields[1], fields[3] = "6_[0-8:4,31%2]", "0-8:4,31%2"
    found = parse_queue(DELIMITER.join(fields), DELIMITER, wanted)
    assert [job.key for job in found] == keys
    assert all(job.raw_id == job.array_id == 6 for job in found)
    reader, everything = QueueReader(), parse_queue(DELIMITER.join(fields), DELIMITER)
    for look in ("first", "again"):
        assert reader.parse(DELIMITER.join(fields), DELIMITER) == everything, look


def test_what_has_not_changed_since_the_last_look_is_not_parsed_again(slurm: Recorded) -> None:
    text, other = slurm.text("squeue"), "~ffffffff~"
    reader = QueueReader()
    first = reader.parse(text, DELIMITER)
    assert first == list(slurm.jobs.values())
    again = reader.parse(text.replace(DELIMITER, other), other)
    assert all(job is earlier for job, earlier in zip(again, first, strict=True))
    job = next(job for job in first if job.running)
    changed = text.replace(f"{job.end_s}", f"{(job.end_s or 0) + 7}")
    assert reader.parse(changed, DELIMITER) == parse_queue(changed, DELIMITER) != first
    ended = changed.replace("RUNNING", "COMPLETING")
    assert reader.parse(ended, DELIMITER) == parse_queue(ended, DELIMITER)


def test_a_running_sharer_with_a_tag_and_a_hostile_comment(slurm: Recorded) -> None:
    job = slurm.jobs["2"]
    assert job.running
    assert job.nodes == ("gpu0",)
    assert job.shard == Gres("shard", "v100_0", 1)
    assert job.admin_comment.startswith("site note GS1:")
    assert job.tag is not None
    assert (job.tag.token, job.tag.original, job.tag.placed) == ("gs-aaaaaaaaaaaaaaaaaaaa", "gpu:1", "gpu0:0")
    comments = parse_texts(slurm.text("comments"), COMMENT_COLUMNS, DELIMITER)
    assert "\n99~00000001~|,x" in comments["2"]
    assert comments.keys() == slurm.jobs.keys()
    assert job.limit_s == 3600
    assert job.start_s is not None
    assert job.start_s >= job.submit_s > 1_700_000_000
    assert job.mem_mib == 100


def test_a_job_that_begins_later_and_its_features(slurm: Recorded) -> None:
    task = slurm.jobs["6_1"]
    assert task.pending
    assert task.reason == "BeginTime"
    assert task.eligible_s is not None
    assert task.eligible_s - task.submit_s == 3600
    assert task.limit_s == 26 * 3600
    assert task.features == "v100&v100"
    assert task.gres == (Gres("gpu", "", 1),)
    assert task.per_job
    assert not task.exclusive


def test_dependency_hold_and_exclusive(slurm: Recorded) -> None:
    dependent, held = slurm.jobs["7"], slurm.jobs["8"]
    assert dependent.dependency
    assert dependent.gres == (Gres("gpu", "", 2),)
    assert dependent.wanted_nodes == "gpu0"
    assert not dependent.exclusive
    assert held.held
    assert held.exclusive
    assert held.num_nodes == 2
    assert not held.gres


def test_per_task_gpus_exclusions_and_requeue(slurm: Recorded) -> None:
    job = slurm.jobs["9"]
    assert Gres("gpu", "", 1) in job.gres
    assert job.per_gpu_extras
    assert not job.requeue
    assert slurm.jobs["2"].requeue
    assert job.excluded_nodes == (() if slurm.name == "22.05" else ("gpu1",)), "22.05 does not tell"


def test_cpus_per_task_is_not_taken_for_a_gpu(slurm: Recorded) -> None:
    job = slurm.jobs["5"]
    assert job.gres == (Gres("gpu", "", 1),)
    assert job.cpus == 3


def test_nodes(slurm: Recorded) -> None:
    busy, drained = slurm.nodes["gpu0"], slurm.nodes["gpu1"]
    assert busy.usable
    assert not drained.usable
    assert busy.gpus == {0: "v100_0", 1: "v100_1"}
    assert busy.shards_per_gpu == {0: 2, 1: 2}
    assert set(busy.partitions) == {"gpu", "other"}
    assert (busy.cpus, busy.cpus_alloc, busy.mem_mib, busy.mem_alloc_mib) == (64, 3, 256_000, 300)
    assert busy.features == ("v100",)
    assert drained.usage.whole == {0}


def test_occupancy_is_the_same_on_every_release(slurm: Recorded) -> None:
    cards = occupancy(slurm.nodes.values(), slurm.jobs.values())
    seats = {str(card): [share.job.key for share in use.occupants] for card, use in cards.items()}
    assert seats == {"gpu0:0": ["2", "3"], "gpu0:1": ["4"], "gpu1:0": ["5"], "gpu1:1": []}
    assert cards[GpuAddress("gpu0", 1)].occupants[0].whole, "all shards of a card"
    assert cards[GpuAddress("gpu1", 0)].occupants[0].whole
    assert not any(use.stranger for use in cards.values())


def test_accounting(slurm: Recorded) -> None:
    jobs = {job.key: job for job in parse_accounting(slurm.text("sacct"), DELIMITER, MARK)}
    assert jobs["1"].state == "COMPLETED"
    assert jobs["1"].gpus == 1
    assert (jobs["4"].shards, jobs["4"].gpus) == (2, 0)
    assert jobs["3"].limit_s == 600
    assert jobs["3"].end_s is None
    assert jobs["9"].nodes == ()
    assert jobs["9"].start_s is None


def test_site(slurm: Recorded) -> None:
    config = parse_config(slurm.text("config"))
    assert config["StateSaveLocation"] == "/testbed/spool/slurmctld"
    assert config["SLURM_VERSION"] == str(slurm.release)
    partitions = {partition.name: partition for partition in parse_partitions(slurm.text("partitions"))}
    assert partitions["gpu"].fields["State"] == "UP"
    assert partitions["gpu"].max_time_s is None
    (reservation,) = parse_reservations(slurm.text("reservations"))
    assert reservation.nodes == ("gpu1",)
    assert reservation.end_s - reservation.start_s == 3600
