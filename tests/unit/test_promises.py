"""What a promise is, and that everybody asks the same place."""

from __future__ import annotations

import ast

import pytest
from gpushare_lab.experiment.scenarios import SITE
from test_architecture import PACKAGE

from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import DEFAULTS, KEYS, SitePromises


@pytest.mark.parametrize(
    ("guest", "own_pct", "promised"),
    [(False, None, 25), (True, None, 50), (False, 10, 10), (True, 10, 10), (False, 40, 25), (True, 40, 40)],
)
def test_the_promise_is_the_site_s_for_the_role_or_the_owner_s_own_if_that_is_less(
    guest: bool, own_pct: float | None, promised: float
) -> None:
    assert SitePromises(25, 50).of(guest=guest, own_pct=own_pct) == promised


def test_the_defaults_are_those_of_gpushare_conf() -> None:
    settings = PolicySettings.from_config(DEFAULTS)
    assert settings == PolicySettings()
    assert DEFAULTS.promises == settings.promises == SITE
    by_name = {key.name: float(key.default) for key in KEYS if key.name in ("ResidentBudget", "GuestCap")}
    assert SitePromises(by_name["ResidentBudget"], by_name["GuestCap"]) == SITE


def test_promises_are_made_of_settings_only() -> None:
    """A second list of the site's promises would be a second truth."""
    made = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "SitePromises"
    }
    assert made == {"protocol/policy.py", "protocol/settings.py"}
