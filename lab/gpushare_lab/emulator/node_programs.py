"""Stand-ins of what a node's prolog and the MPS unit call: systemctl for that one unit, and nvidia-smi.

    systemctl start|stop gpushare-mps@N        runs the unit's own lines, in systemd's order
    nvidia-smi -i N -c MODE                    sets an emulated card's compute mode
    nvidia-smi -i N --query-gpu=memory.total   says how much memory it has

Each call is a line of the file that ``GPUSHARE_EMU_CALLS`` names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpushare_lab.emulator.card import ComputeMode, EmulatedCard
from gpushare_lab.emulator.mps_control import install
from gpushare_lab.emulator.node import card_path, set_compute_mode
from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.settings_in_force import settings_in_force

UNIT = "gpushare-mps@"


def install_programs(bin_dir: Path) -> None:
    """All of them, in a directory for PATH."""
    install(bin_dir)
    for name in ("systemctl", "nvidia-smi"):
        install(bin_dir, "node_programs", name).write_text(
            f'#!/bin/sh\nexec {sys.executable} -m gpushare_lab.emulator.node_programs {name} "$@"\n'
        )


def _unit(instance: str, state_dir: Path) -> dict[str, list[str]]:
    text = (resource_dir("share") / "systemd" / f"{UNIT}.service").read_text()
    text = text.replace("@STATE_DIR@", str(state_dir)).replace("%i", instance)
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            found.setdefault(key, []).append(value)
    return found


def systemctl(verb: str, name: str) -> int:
    """0 as systemctl where all the unit's lines worked."""
    instance = name.removeprefix(UNIT)
    unit = _unit(instance, settings_in_force().state_dir)
    environ = dict(os.environ) | dict(item.split("=", 1) for item in unit["Environment"])
    for path in unit["EnvironmentFile"]:
        lines = Path(path.lstrip("-")).read_text().splitlines() if Path(path.lstrip("-")).exists() else []
        environ |= dict(line.split("=", 1) for line in lines)
    active = Path(unit["PIDFile"][0]).exists()
    if (verb == "start") is active:
        return 0
    keys = ("ExecStartPre", "ExecStart", "ExecStartPost") if verb == "start" else ("ExecStop", "ExecStopPost")
    for key in keys:
        for command in unit[key]:
            done = subprocess.run(["sh", "-c", command.replace("$$", "$")], env=environ)
            if done.returncode and key != "ExecStop":
                return 1
    return 0


def nvidia_smi(*words: str) -> int:
    """The two uses above."""
    emu, node = Path(os.environ["GPUSHARE_EMU_DIR"]), os.environ["GPUSHARE_EMU_NODE"]
    gpu = int(words[words.index("-i") + 1])
    if "-c" in words:
        set_compute_mode(emu, node, gpu, ComputeMode[words[words.index("-c") + 1]])
    else:
        with EmulatedCard(card_path(emu, node, gpu)) as card:
            print(card.info.mem_total_mib)
    return 0


def main(program: str, *words: str) -> int:
    if calls := os.environ.get("GPUSHARE_EMU_CALLS"):
        with open(calls, "a") as file:
            print(program, *words, file=file)
    return systemctl(*words) if program == "systemctl" else nvidia_smi(*words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
