"""Entry point of ``gpushare-lab``: its subcommands, loaded when called; errors are reported as `gpushare` does."""

from __future__ import annotations

import sys

import click

from slurm_gpushare import __version__
from slurm_gpushare.cli import main as product


class LabGroup(product.LazyGroup):
    """The lab's subcommands and their help. Each is a function of that name in the module of that name."""

    PACKAGE = "gpushare_lab.cli"
    _COMMANDS = {  # noqa: RUF012 - a Mapping, never changed
        "characterize": "Characterise public workloads as the paper does.",
        "demo": "Show jobs sharing GPUs on a throw-away Slurm.",
        "forms": "Try every way to ask for GPUs on this cluster.",
        "replay": "Run a trace on a real Slurm with emulated GPUs.",
        "scenarios": "Put promises to the test on a real Slurm with emulated GPUs.",
        "simulate": "Run our policy and its peers on the same jobs.",
        "testbed": "A real throw-away Slurm with emulated V100s.",
    }
    SECTIONS = {"Commands": _COMMANDS}  # noqa: RUF012
    MODULES = EARLIER = {}  # noqa: RUF012


CLEANS_UP = frozenset({"demo", "replay", "scenarios", "testbed"})
"""Commands that have something to undo when Ctrl-C is pressed; the others just end."""


@click.group(cls=LabGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="gpushare-lab")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def gpushare_lab(debug: bool) -> None:
    """Prove slurm-gpushare: emulated GPUs, a throw-away Slurm, replays, simulations and the paper's experiment."""


def main(argv: list[str] | None = None) -> None:
    """``gpushare-lab``: run the command line and exit."""
    product.run(gpushare_lab, "gpushare-lab", CLEANS_UP, sys.argv[1:] if argv is None else argv)
