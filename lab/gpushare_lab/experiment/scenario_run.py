"""The scenarios on a testbed: each on a node of its own, all at once; the one that kills the helper comes last."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpushare_lab.emulator.node import MEM_TOTAL_MIB
from gpushare_lab.experiment.helper_process import HelperProcess
from gpushare_lab.experiment.scenarios import Actor, Scenario, ScenarioOutcome, ScenarioResult, begun
from gpushare_lab.experiment.submitting import ENDED, show, submit
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.stored_jobs import EVER

SETTINGS = {
    "TickSeconds": "1",
    "SampleSeconds": "0.2",
    "InterimSeconds": "2",
    "LeaseSeconds": "60",
    "HeartbeatSeconds": "20",
}
LONGEST_S = 1200.0
_ISD = re.compile(r"^done .*isd_pct=([-\d.]+)", re.MULTILINE)
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Scene:
    """A scenario on its node."""

    result: ScenarioResult
    node: str
    tokens: tuple[str, str]
    resident: int = 0
    guest: int = 0
    disturbed: bool = False

    @property
    def jobs(self) -> tuple[int, int]:
        return self.resident, self.guest


class ScenarioRun:
    """Runs scenarios on a testbed that is up, with a node for each."""

    def __init__(self, testbed: Testbed, progress: Progress, *, reloads: bool = False) -> None:
        """`reloads`: with SIGHUP to the helper every two seconds from when jobs share."""
        self._testbed, self._reloads = testbed, reloads
        self._tell = progress
        testbed.configure(gpushare=SETTINGS)
        self._config = load_config(testbed.layout.gpushare_conf)
        self._store = Store.create(self._config.store_url)

    def run(self, scenarios: Sequence[Scenario]) -> list[ScenarioResult]:
        """The table, in the order of the scenarios."""
        nodes = self._testbed.state.shape.node_names
        scenes = [
            _Scene(begun(item), nodes[at % len(nodes)], (_token(2 * at), _token(2 * at + 1)))
            for at, item in enumerate(scenarios)
        ]
        self._enter(scenes)
        together = [scene for scene in scenes if scene.result.scenario.during_pause != "kill"]
        for some in (together, *([scene] for scene in scenes if scene not in together)):
            if some:
                self._act(some)
        return [scene.result for scene in scenes]

    def _enter(self, scenes: Sequence[_Scene]) -> None:
        profiles = [
            KnownProfile(
                token, 0, "V100", actor.mem_mib, MEM_TOTAL_MIB, 1, actor.known_s,
                {"proc_sm_pct_mean": actor.known_util_pct},
            )
            for scene in scenes
            for token, actor in zip(scene.tokens, _actors(scene), strict=True)
        ]  # fmt: skip
        enter_profiles(self._store, profiles)

    def _act(self, scenes: Sequence[_Scene]) -> None:
        with HelperProcess(self._testbed, "fcfs") as helper:
            HookFile(self._config.hook_file).sync(self._store)
            self._testbed.wait_for_hook()
            for scene in scenes:
                scene.resident = self._submit(scene, 0)
            self._until(lambda: all(self._alone_is_known(scene) for scene in scenes), "residents are measured alone")
            for scene in scenes:
                scene.guest = self._submit(scene, 1)
            self._until(lambda: self._all_ended(scenes, helper), "all have ended")
        for scene in scenes:
            self._collect(scene)

    def _submit(self, scene: _Scene, side: int) -> int:
        actor = _actors(scene)[side]
        cap = "" if actor.max_isd_pct is None else f",max={actor.max_isd_pct}"
        script = (
            "unset GPUSHARE_EPOCH_FILE; exec python -m gpushare_lab.job.workload "
            f"--gpu-util {actor.util_pct:g} --mem-access {actor.access_pct:g} --mem-mib {actor.mem_mib} "
            f"--mem-grow-mib {actor.grows_mib} --work-s {actor.work_s:g} --epochs {max(1, round(actor.work_s / 2))}"
        )
        return submit(
            self._testbed, script, "--gres=gpu:1", "--mem=100", f"--nodelist={scene.node}", f"--time={actor.limit_min}",
            f"--output={self._output(scene, side)}", f"--comment=gpushare:{scene.tokens[side]}{cap}",
        )  # fmt: skip

    def _output(self, scene: _Scene, side: int) -> str:
        return str(self._testbed.layout.home / f"scenario-{scene.tokens[side]}.out")

    def _alone_is_known(self, scene: _Scene) -> bool:
        record = self._store.live.of_jobs({scene.resident}).get(scene.resident)
        stat = record.alone.stats.get("proc_sm_pct") if record else None
        return stat is not None and stat.n >= 20

    def _all_ended(self, scenes: Sequence[_Scene], helper: HelperProcess) -> bool:
        if self._reloads:
            helper.reload()
        for scene in scenes:
            kind = scene.result.scenario.during_pause
            if kind and not scene.disturbed and "paused" in self._actions(scene):
                scene.disturbed = True
                self._tell(f"{scene.result.scenario.name}: {kind}")
                if kind == "drain":
                    node = ["scontrol", "update", f"NodeName={scene.node}", "State=DRAIN", "Reason=scenario"]
                    self._testbed.run(node)
                else:
                    helper.kill()
                    self._watchdog(scene)
                    helper.start()  # as its unit does
        return all(show(self._testbed, job)["JobState"] in ENDED for scene in scenes for job in scene.jobs)

    def _watchdog(self, scene: _Scene) -> None:
        """What the watchdog's timer does, once the helper's heartbeat is old."""
        hook = HookFile(self._config.hook_file)
        self._until(lambda: time.time() - (hook.heartbeat_s() or 0.0) > self._config.heartbeat_s, "it looks dead", 1.0)
        done = self._testbed.run(
            [*HelperProcess.COMMAND, "release", "--if-stale"], user=self._testbed.slurm_user, check=False
        )
        self._tell(f"watchdog: {done.stdout.strip() or done.stderr.strip()}")
        if show(self._testbed, scene.guest)["JobState"] not in ("SUSPENDED", "STOPPED"):
            scene.result.actions.append("resumed by the watchdog")

    def _actions(self, scene: _Scene) -> list[str]:
        kinds = [item.kind for job in scene.jobs if job for item in self._store.decisions.of_jobs({job: EVER})]
        acted = ("paused", "resumed", "requeued", "slowed", "outgrown", "out-of-memory", "extended")
        return [kind for kind in acted if kind in kinds]

    def _collect(self, scene: _Scene) -> None:
        result = scene.result
        result.actions = [*self._actions(scene), *result.actions]
        for side, outcome, job in zip((0, 1), (result.resident, result.guest), scene.jobs, strict=True):
            outcome.state = show(self._testbed, job)["JobState"]
            outcome.measured_pct = self._measured(scene, side, outcome)
        self._tell(f"{result.scenario.name}: {result.verdict}")

    def _measured(self, scene: _Scene, side: int, outcome: ScenarioOutcome) -> float | None:
        try:
            with open(self._output(scene, side), encoding="utf-8") as file:
                found = _ISD.search(file.read())
        except OSError:
            return None
        return float(found[1]) if found and outcome.state == "COMPLETED" else None

    def _until(self, condition: Callable[[], bool], what: str, every_s: float = 2.0) -> None:
        end = time.monotonic() + LONGEST_S
        while not condition():
            if time.monotonic() > end:
                raise GpushareError(f"scenarios: not after {LONGEST_S:.0f} s: {what}")
            time.sleep(every_s)


def _actors(scene: _Scene) -> tuple[Actor, Actor]:
    return scene.result.scenario.resident, scene.result.scenario.guest


def _token(number: int) -> str:
    return f"gs-{_LETTERS[number % len(_LETTERS)] * 20}"
