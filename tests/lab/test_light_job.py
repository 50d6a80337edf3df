"""The emulated job in C: the same card, the same arithmetic and the same load as the one in Python."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from emulated import NODE, EmulatedNode, figures
from gpushare_lab.job.light_job import build_light_job
from gpushare_lab.testbed.processes import wait_until


@pytest.fixture(scope="module")
def light_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_light_job(tmp_path_factory.mktemp("light"))


class Bench:
    """Starts light jobs on an emulated node."""

    def __init__(self, node: EmulatedNode, binary: Path, directory: Path) -> None:
        self.node, self._binary, self._directory = node, binary, directory

    def start(
        self, profile: str, work_s: float, mem_mib: int = 1000, cards: str = "0", **rates: float
    ) -> subprocess.Popen[str]:
        file = self.set_rates(profile, **rates)
        return subprocess.Popen(
            [self._binary, str(work_s), "2", "60", "20", str(mem_mib), profile, file],
            env=self.node.env(SLURMD_NODENAME=NODE, CUDA_VISIBLE_DEVICES=cards), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def set_rates(self, profile: str, **rates: float) -> Path:
        file, new = self._directory / f"{profile}.rates", self._directory / "new"
        new.write_text("".join(f"{name} {rate}\n" for name, rate in rates.items()))
        return new.replace(file)

    def occupants(self, gpu: int = 0) -> int:
        with self.node.card(gpu) as card:
            return sum(stay.until_us is None for stay in card.occupants(0))


@pytest.fixture
def bench(emulated_node: EmulatedNode, light_job: Path, tmp_path: Path) -> Bench:
    return Bench(emulated_node, light_job, tmp_path)


def ended(job: subprocess.Popen[str]) -> dict[str, float]:
    out, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (0, "")
    done, node, *rest = out.split()
    assert (done, node) == ("done", f"node={NODE}")
    return figures(" ".join(rest))


def test_a_lone_job_takes_its_stated_time(bench: Bench) -> None:
    before_s = time.time()
    done = ended(bench.start("a", 0.4))
    assert done["ended_s"] - done["joined_s"] == pytest.approx(0.4, abs=0.002)
    assert before_s <= done["joined_s"] <= done["ended_s"] <= time.time() + 0.01
    assert bench.occupants() == 0


def test_a_pair_is_slowed_as_measured_for_as_long_as_it_lasts(bench: Bench) -> None:
    large = bench.start("large", 1.5, small=0.5)
    assert wait_until(lambda: bench.occupants() == 1, 20)
    small = ended(bench.start("small", 0.3, large=0.6))
    whole = ended(large)
    shared_s = small["ended_s"] - small["joined_s"]
    assert shared_s == pytest.approx(0.3 / 0.6, abs=0.002)
    assert whole["ended_s"] - whole["joined_s"] == pytest.approx(1.5 + 0.5 * shared_s, abs=0.005)


def test_rates_that_change_hold_for_jobs_that_run(bench: Bench) -> None:
    other = bench.start("other", 600)
    assert wait_until(lambda: bench.occupants() == 1, 20)
    victim = bench.start("victim", 1.0, other=0.01)
    assert wait_until(lambda: bench.occupants() == 2, 20)
    bench.set_rates("victim", other=1.0)
    done = ended(victim)
    other.terminate()
    other.communicate(timeout=60)
    assert done["ended_s"] - done["joined_s"] < 50, "it would have taken 100 s"


def test_a_gang_has_a_seat_on_each_of_its_cards_and_is_as_fast_as_on_the_slowest(bench: Bench) -> None:
    slow, fast = bench.start("slow", 30, cards="0"), bench.start("fast", 30, cards="1")
    assert wait_until(lambda: bench.occupants(0) == bench.occupants(1) == 1, 20)
    gang = bench.start("gang", 0.6, cards="0,1", slow=0.5, fast=0.9)
    assert wait_until(lambda: bench.occupants(0) == bench.occupants(1) == 2, 20)
    out, _ = gang.communicate(timeout=60)
    _, node, gpus, *rest = out.split()
    done = figures(" ".join(rest))
    for job in (slow, fast):
        job.kill()
    assert (node, gpus) == (f"node={NODE}", "gpu=0,1")
    assert done["ended_s"] - done["joined_s"] == pytest.approx(0.6 / 0.5, abs=0.002)


def test_a_gang_that_does_not_fit_on_one_of_its_cards_takes_none(bench: Bench) -> None:
    there = bench.start("there", 30, mem_mib=9000, cards="1")
    assert wait_until(lambda: bench.occupants(1) == 1, 20)
    gang = bench.start("gang", 1, mem_mib=9000, cards="0,1")
    assert "(GPU 1)" in gang.communicate(timeout=60)[1]
    there.kill()
    assert gang.returncode == 1
    with bench.node.card(0) as card:
        assert card.occupants(0) == []


@pytest.mark.parametrize(("mem_mib", "rate"), [(9000, 0.9), (1000, 0.0)])
def test_a_job_that_does_not_fit_beside_its_neighbour_dies_of_memory(bench: Bench, mem_mib: int, rate: float) -> None:
    there = bench.start("there", 30, mem_mib=9000)
    assert wait_until(lambda: bench.occupants() == 1, 20)
    late = bench.start("late", 1, mem_mib=mem_mib, there=rate)
    assert "OutOfMemoryError" in late.communicate(timeout=60)[1]
    assert late.returncode == 1
    there.send_signal(signal.SIGTERM)
    assert there.communicate(timeout=60)[0].startswith("stopped ")
    assert there.returncode == 128 + signal.SIGTERM
    assert bench.occupants() == 0


def test_nvml_reports_its_load_and_memory(bench: Bench) -> None:
    job = bench.start("a", 30)
    assert wait_until(lambda: bench.occupants() == 1, 20)
    time.sleep(1.2)
    answer = bench.node.nvml("n.nvmlDeviceGetUtilizationRates(card).gpu, n.nvmlDeviceGetMemoryInfo(card).used >> 20")
    job.kill()
    util, used = (int(word) for word in answer.split())
    assert 15 <= util <= 65
    assert used >= 1000


def test_a_suspended_job_does_not_work_and_does_not_slow_its_neighbour(bench: Bench) -> None:
    large = bench.start("large", 2.0, small=0.5)
    assert wait_until(lambda: bench.occupants() == 1, 20)
    small = bench.start("small", 30, large=0.6)
    assert wait_until(lambda: bench.occupants() == 2, 20)
    small.send_signal(signal.SIGSTOP)
    done = ended(large)
    small.kill()
    assert done["ended_s"] - done["joined_s"] < 2.0 + 1.2  # it was slowed at most until the other's last sign of life
