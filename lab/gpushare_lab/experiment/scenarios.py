"""What a promise is worth when things go wrong: ten scenarios, each a resident and a guest on a card of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpushare_lab.emulator.card import Demand
from gpushare_lab.job import contention
from slurm_gpushare.protocol.settings import DEFAULTS

SITE = DEFAULTS.promises
TOLERATED = 1.1
"""A promise counts as broken where it is passed by more than a tenth."""


@dataclass(frozen=True, slots=True)
class Actor:
    """One of the two jobs: what it does, and what its profile says of it."""

    util_pct: float
    access_pct: float
    mem_mib: int
    work_s: float
    limit_min: int = 10
    grows_mib: int = 0
    max_isd_pct: int | None = None
    profile_util_pct: float | None = None
    """None: what it does."""
    profile_s: float | None = None
    """Length of its one earlier run; None: as long as this one."""

    @property
    def demand(self) -> Demand:
        return Demand(self.util_pct, self.access_pct, self.mem_mib)

    @property
    def honest(self) -> bool:
        return self.profile_util_pct is None and not self.grows_mib

    @property
    def known_util_pct(self) -> float:
        return self.util_pct if self.profile_util_pct is None else self.profile_util_pct

    @property
    def known_s(self) -> float:
        return self.work_s if self.profile_s is None else self.profile_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """Two jobs, and what happens to them."""

    name: str
    resident: Actor
    guest: Actor
    during_pause: str = ""
    """``kill``: the helper is killed while the guest is paused; ``drain``: its node is drained."""
    expected: tuple[str, ...] = ()
    """Kinds of decisions that must be among the actions."""
    note: str = ""

    def rates(self) -> tuple[float, float]:
        """True rates of resident and guest beside each other."""
        one, other = self.resident.demand, self.guest.demand
        return contention.rate(one, [other]), contention.rate(other, [one])


@dataclass(slots=True)
class ScenarioOutcome:
    """What became of one side of a scenario."""

    role: str
    promised_pct: float
    honest: bool
    measured_pct: float | None = None
    """Its slow-down over the whole run, as the job itself counts it; None: it did not come to its end."""
    state: str = ""

    @property
    def kept(self) -> bool:
        """Whether an honest job got what it was promised; a job that is not what its profile says is owed nothing."""
        ended = self.state == "COMPLETED" and self.measured_pct is not None
        return not self.honest or (ended and (self.measured_pct or 0.0) <= TOLERATED * self.promised_pct)


@dataclass(slots=True)
class ScenarioResult:
    """One row of the table."""

    scenario: Scenario
    resident: ScenarioOutcome
    guest: ScenarioOutcome
    actions: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Actions that were expected and did not happen."""
        return [kind for kind in self.scenario.expected if kind not in self.actions]

    @property
    def kept(self) -> bool:
        return self.resident.kept and self.guest.kept and not self.missing

    @property
    def verdict(self) -> str:
        if self.kept:
            return f"kept{'; ' + self.scenario.note if self.scenario.note else ''}"
        broken = [side.role for side in (self.resident, self.guest) if not side.kept]
        return f"BROKEN: {', '.join([*broken, *(f'no {kind}' for kind in self.missing)])}"


def begun(scenario: Scenario) -> ScenarioResult:
    """A result before anything has happened."""
    resident, guest = scenario.resident, scenario.guest
    return ScenarioResult(
        scenario,
        ScenarioOutcome("resident", SITE.of(guest=False, own_pct=resident.max_isd_pct), resident.honest),
        ScenarioOutcome("guest", SITE.of(guest=True, own_pct=guest.max_isd_pct), guest.honest),
    )


_HONEST = Actor(60, 30, 4096, 80)
_LIAR = Actor(80, 50, 2048, 80, profile_util_pct=20, profile_s=20)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("honest pair", Actor(30, 10, 4096, 60), Actor(30, 10, 2048, 40)),
    Scenario("liar in utilisation", _HONEST, _LIAR, expected=("paused", "resumed")),
    Scenario(
        "liar in memory",
        Actor(30, 10, 9000, 60),
        Actor(30, 10, 2048, 40, grows_mib=4700),
        expected=("outgrown",),
        note="a jump past the card's end within one sample would end the job that jumps",
    ),
    Scenario(
        "short first run",
        Actor(30, 10, 4096, 100, profile_s=15),
        Actor(30, 10, 2048, 60, profile_s=15),
        note="its one run of 15 s says little",
    ),
    Scenario("runaway duration", _HONEST, Actor(80, 50, 2048, 150, profile_s=15), expected=("paused",)),
    Scenario("guest that outlives", Actor(30, 10, 4096, 25), Actor(30, 10, 2048, 60)),
    Scenario(
        "owner's max=10",
        Actor(60, 30, 4096, 80, max_isd_pct=10),
        Actor(60, 30, 2048, 60, profile_util_pct=20),
        expected=("paused",),
    ),
    Scenario(
        "time limit too near", Actor(30, 10, 4096, 70), Actor(30, 10, 2048, 52, limit_min=1), expected=("extended",)
    ),
    Scenario("node drained in a pause", _HONEST, _LIAR, during_pause="drain", expected=("paused", "resumed")),
    Scenario("helper killed in a pause", Actor(60, 30, 4096, 240), _LIAR, during_pause="kill", expected=("paused",)),
)
SHORT = ("liar in utilisation", "time limit too near")
"""What ``make test`` runs."""
