"""``gpushare off`` and ``on``: a card out of sharing at once, and Slurm's whole GPUs as ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from world import NEW, NOW, TOKEN_A, job, node, running

from slurm_gpushare.cli import off as off_module
from slurm_gpushare.cli.off import off, on
from slurm_gpushare.helper.observe import observe
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.queue_facts import StoreReader
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.settings import Config, parse_config
from slurm_gpushare.report.sources import StoreSource
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.store.store import Store


class TwoNodes:
    """A Slurm with two nodes of two cards."""

    def nodes(self) -> list[Node]:
        return [node("n0"), node("n1")]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    config = parse_config(f"StoreUrl=sqlite:///{tmp_path}/store.sqlite\nPartitions=gpu\n")
    Store.create(config.store_url).close()
    monkeypatch.setattr(off_module.console, "settings", lambda: config)
    monkeypatch.setattr(off_module, "connect", lambda: TwoNodes())
    return config


def cards(config: Config) -> list[str]:
    with Store(config.store_url, read_only=True) as store:
        return [f"{card.node}:{card.gpu}" for card in store.knowledge.off_cards()]


def run(command: object, *words: str) -> str:
    done = CliRunner().invoke(command, words, catch_exceptions=False)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


def test_cards_and_whole_nodes_go_off_and_come_back(config: Config) -> None:
    run(off, "n0:1", "n1", "--why", "fan is loud")
    assert cards(config) == ["n0:1", "n1:0", "n1:1"]
    run(on, "n1:0")
    assert cards(config) == ["n0:1", "n1:1"], "one card of a node that was off as a whole"
    assert "fan is loud" in run(off)
    assert {card["gpu"] for card in json.loads(run(off, "--json"))} == {1}
    run(on, "--all")
    assert cards(config) == []
    assert "no card is off" in run(off)


def test_a_dry_run_changes_nothing(config: Config) -> None:
    assert "n0:0,1 n1:0,1: would be out" in run(off, "n[0-1]", "--dry-run")
    assert cards(config) == []
    run(off, "n0:0")
    assert "n0:0: would share again" in run(on, "--all", "--dry-run")
    assert cards(config) == ["n0:0"]


@pytest.mark.parametrize("place", ["n7", "n0:2", "n0:x"])
def test_what_is_not_there_is_a_mistake(config: Config, place: str) -> None:
    with pytest.raises(BadInput, match=r"no node 'n7'|n0 has no card"):
        CliRunner().invoke(off, [place], catch_exceptions=False)
    assert cards(config) == []


def test_the_plan_puts_nobody_beside_anybody_there_and_status_says_so(config: Config) -> None:
    run(off, "n0:0")
    resident = running("1", "n0", "gres/shard:v100_0:1", tag=f"GS1:;t={TOKEN_A}")
    with Store(config.store_url) as store:
        facts = StoreReader(store).read([resident], {}, {}, NOW, ["v100"])
        view = observe([resident, job("2")], [node("n0", release=NEW)], config, facts, NOW)
        shares = {gpu.index: not gpu.exclusive_process for gpu in view.snapshot.gpus}
        assert shares == {0: False, 1: True}
        assert all(gpu.usable for gpu in view.snapshot.gpus), "whole jobs have it as ever"
        assert set(StoreSource(store, config.public_dir).live().off) == {GpuAddress("n0", 0)}
