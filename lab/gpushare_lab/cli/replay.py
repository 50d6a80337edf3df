"""``gpushare-lab replay``: a trace on a real Slurm with emulated cards; the simulator's word on the same jobs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gpushare_lab.cli.checks import check_counts
from gpushare_lab.cli.testbed import SLURM, Steps, stop_on_sigterm, throw_away_dir
from gpushare_lab.experiment.replay_jobs import ReplayJobs, replay_jobs
from gpushare_lab.experiment.replay_outcome import start_s
from gpushare_lab.experiment.replay_run import KNOWLEDGE, MEASURED, POLICIES, Replay, ReplayProgress
from gpushare_lab.experiment.replay_simulation import simulated
from gpushare_lab.experiment.run_page import write_run_page
from gpushare_lab.paper.plots import check_picture
from gpushare_lab.peers.trace_jobs import read_any_trace, read_rates
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare import __version__
from slurm_gpushare.cli.console import FILE, table, warn
from slurm_gpushare.knowledge.tables import write_text
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import check_directory
from slurm_gpushare.protocol.release import parse_release

GPUS_A_NODE = 4
TELL_S = 10.0


@click.command()
@click.option(
    "--trace",
    type=FILE,
    required=True,
    help="Jobs: submit_s, duration_s, num_gpus; those of one GPU run, with --multi-gpu all.",
)
@click.option("--pairs", type=FILE, required=True, help="Measured rates of pairs of profiles; a profile is a token.")
@click.option("--gpus", type=int, required=True, help="Number of GPUs, four a node where that fits.")
@click.option("--jobs", type=int, help="Only the first so many jobs.")
@click.option("--load", type=float, default=1.2, show_default=True, help="Offered load; 0: arrivals as traced.")
@click.option("--multi-gpu", is_flag=True, help="Also take the trace's jobs of several GPUs, each on one node; those "
              "that want as many as a node has, or more, get a node and may share it.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the jobs' profiles and time limits.")
@click.option("--mean-seconds", "mean_s", type=float, default=45.0, show_default=True,
              help="Mean time that a job takes alone; each takes 3 s to 5 minutes.")  # fmt: skip
@click.option("--policy", "policies", default="exclusive,packed,gpushare", show_default=True,
              help=f"One after the other, or 'all': {', '.join(POLICIES)}.")  # fmt: skip
@click.option("--knowledge", type=click.Choice(KNOWLEDGE), default="learned", show_default=True,
              help="Of rates: their mean, what telemetry says, that and what is learned, or the truth.")  # fmt: skip
@SLURM
@click.option("--json", "json_out", type=FILE, help="Write all figures there, after each policy.")
@click.option("--picture", type=FILE, help="Draw cards and jobs there (.png, .svg, .pdf). Default: beside --json.")
@click.option("--html", type=FILE, help="Write the report's page of the last policy there.")
@throw_away_dir("/var/lib/gpushare-replay")
def replay(
    trace: Path, pairs: Path, gpus: int, jobs: int | None, load: float, multi_gpu: bool, seed: int, mean_s: float,
    policies: str,
    knowledge: str, suite: str | None, json_out: Path | None, picture: Path | None, html: Path | None,
    directory: Path,
) -> None:  # fmt: skip
    """Run a trace on a real Slurm with emulated GPUs.

    Its time is compressed. The same jobs run under one policy after another, and beside each policy stand the
    simulator's figures for the very same jobs. An interrupted replay takes its testbed down and keeps what it measured.
    """
    names = _policies(policies)
    check_counts(gpus, jobs)
    _check_numbers(load, seed)
    check_directory("--json", json_out)
    check_directory("--html", html)
    check_picture("--picture", picture)
    rates, of_trace = read_rates(pairs), read_any_trace(trace)
    shape = _shape(gpus)
    if multi_gpu and shape.gpus == 1:
        raise BadInput(f"--multi-gpu with --gpus {gpus}: nodes would have one GPU each", "Give a multiple of 4.")
    work = replay_jobs(of_trace, rates, gpus=gpus, jobs=jobs, load=load, seed=seed, mean_s=mean_s,
                       node_gpus=shape.gpus if multi_gpu else 0)  # fmt: skip
    if picture is None and json_out is not None:
        picture = json_out.with_suffix(".png")
    steps = Steps()
    stop_on_sigterm()
    meta = {
        "version": __version__, "gpus": gpus, "nodes": shape.nodes, "jobs": work.work.jobs,
        "profiles": len(rates.profiles), "mean_s": float(work.work.duration_s.mean()), "knowledge": knowledge,
        "durations": "history" if knowledge in MEASURED else "limit",
        "clipped": {"short": work.clipped_short, "long": work.clipped_long},
        "clusters": "terciles of the mean aggressor effect, not telemetry", "cpus": os.cpu_count(),
        "multi_gpu": _wide_jobs(work) if multi_gpu else None,
    }  # fmt: skip
    steps(f"{work.work.jobs} jobs of {meta['mean_s']:.0f} s on {gpus} GPUs, {work.clipped_short} of them clipped to 3 s"
          f" and {work.clipped_long} to 5 minutes")  # fmt: skip
    testbed = Testbed(directory, steps).up(shape, suite=suite)
    meta["slurm"] = testbed.release
    run = Replay(testbed, work, knowledge, _Live())
    try:
        if work.gangs.any() and not parse_release(testbed.release).can("keeps_whole_gpus_apart"):
            raise BadInput(f"--multi-gpu: Slurm {testbed.release} cannot share whole nodes", "Add --slurm trixie.")
        for name in names:
            before_s, begun_s = os.getloadavg()[0], time.time()
            result = run.run(name)
            steps(f"{name}: all done after {result.wall_s:.0f} s (load of the machine {before_s:.1f} before, "
                  f"{os.getloadavg()[0]:.1f} after)")  # fmt: skip
            _write(json_out, meta, _rows(run, work, knowledge, load, seed))
        if html is not None:
            steps(f"wrote {write_run_page(testbed, begun_s, html)}")
    finally:
        try:
            testbed.down(purge=True)
        finally:
            _conclude(run, work, meta, _rows(run, work, knowledge, load, seed), json_out, picture)


def _policies(text: str) -> list[str]:
    names: list[str] = []
    for name in POLICIES if text == "all" else text.split(","):
        if name.strip() not in POLICIES:
            raise BadInput(f"--policy: no policy '{name.strip()}'", f"There are: {', '.join(POLICIES)}, all.")
        if name.strip() not in names:
            names.append(name.strip())
    return names


def _wide_jobs(work: ReplayJobs) -> dict[str, Any]:
    """What became of the trace's jobs of several GPUs, and what their rates are worth."""
    gangs = int(work.gangs.sum())
    return {
        "gpus_per_node": work.work.gpus_per_node, "gangs": gangs, "narrowed_to_a_node": work.narrowed,
        "others_of_several_gpus": int((work.work.num_gpus > 1).sum()) - gangs,
        "gang_rates": "those measured for pairs of single-GPU jobs: nobody has measured gangs",
    }  # fmt: skip


def _check_numbers(load: float, seed: int) -> None:
    if not 0 <= load < math.inf:
        raise BadInput(f"--load {load:g}: must be a number from 0")
    if seed < 0:
        raise BadInput(f"--seed {seed}: must be a number from 0")


def _shape(gpus: int) -> Shape:
    """As many nodes of equal size as `gpus` need, four GPUs a node at most."""
    each = next(size for size in range(GPUS_A_NODE, 0, -1) if gpus % size == 0)
    if gpus // each > 64:
        raise BadInput(f"--gpus {gpus}: a testbed has at most 64 nodes of {GPUS_A_NODE} GPUs, all alike")
    return Shape(nodes=gpus // each, gpus=each, shards=2)


class _Live:
    """One line that is rewritten on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._policy = ""

    def __call__(self, now: ReplayProgress) -> None:
        counts = f"{now.submitted:3} submitted, {now.done:3} of {now.total} done"
        line = f"{now.policy:<10} {now.elapsed_s:4.0f} s  {counts}  [{now.cards}]"
        if now.policy != self._policy:
            self._policy, self._next_s = now.policy, 0.0
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", err=True, nl=now.done == now.total)
        elif now.elapsed_s >= self._next_s or now.done == now.total:
            self._next_s = now.elapsed_s + TELL_S
            click.echo(line, err=True)


def _rows(run: Replay, work: ReplayJobs, knowledge: str, load: float, seed: int) -> list[dict[str, Any]]:
    """A row for each policy that was run. What Slurm needs to hand a card over is measured where nobody shares."""
    plain = next((result for result in run.measured if result.policy == "exclusive" and result.stays), None)
    rows = []
    for result in run.measured:
        if not result.stays:
            continue
        handover_s = start_s((plain or result).stays)
        told = simulated(result.policy, work, knowledge, handover_s) | {"start_s": handover_s}
        rows.append(
            {"policy": result.policy, "load": load, "seed": seed, "complete": result.complete,
             "jobs_done": len(result.stays), **result.figures(work.work), "helper": dict(result.counters),
             "simulated": told, "stays": [_rounded(asdict(stay)) for stay in result.stays]}
        )  # fmt: skip
    return rows


def _rounded(stay: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in stay.items()}


def _write(json_out: Path | None, meta: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    if json_out is not None:
        write_text(json_out, json.dumps({"meta": dict(meta), "policies": rows}, indent=1, allow_nan=False) + "\n")


def _conclude(
    run: Replay, work: ReplayJobs, meta: Mapping[str, Any], rows: list[dict[str, Any]], json_out: Path | None,
    picture: Path | None,
) -> None:  # fmt: skip
    """Print, write and draw what was measured, however much that is."""
    if not rows:
        return
    _write(json_out, meta, rows)
    click.echo(_table(rows))
    click.echo(
        "\nSIM_: the same jobs in the simulator, given the time that Slurm takes to hand a card over "
        f"({rows[0]['simulated']['start_s']:.2f} s).\nISD: how much longer a job ran than alone. "
        "PS: GPU time saved against every job alone."
    )
    for row in rows:
        if told := _holds(row):
            click.echo(told)
    if picture is not None:
        from gpushare_lab.experiment.replay_plot import draw_replay

        try:
            click.echo(f"wrote {draw_replay([one for one in run.measured if one.stays], work, picture)}")
        except GpushareError as error:
            warn(str(error))


def _holds(row: Mapping[str, Any]) -> str | None:
    """What the epilogs' holds cost, as the helper counted it."""
    counted = row["helper"]
    if not counted.get("holds"):
        return None
    held_s, busy_s = counted["hold_ms"] / 1000.0, 3600.0 * row["busy_gpu_hours"]
    return (
        f"{row['policy']}: {counted['holds']} holds kept cards for {held_s:.1f} s in all, "
        f"{100.0 * held_s / busy_s:.1f} % of the time in which they computed."
    )


def _table(rows: list[dict[str, Any]]) -> str:
    plain = next((row for row in rows if row["policy"] == "exclusive"), None)
    shown = (("AVG_JCT_S", "avg_jct_s", ".1f"), ("ISD%", "isd_mean_pct", ".1f"), ("PS%", "ps_pct", ".1f"),
             ("SHARED", "shared_fraction", ".2f"), ("P99_JCT_S", "p99_jct_s", ".0f"),
             ("MAX_WAIT_S", "max_wait_s", ".0f"))  # fmt: skip
    columns = ["POLICY", "DONE>"]
    columns += ["OF_EXCL>.3f", "SIM_OF_EXCL>.3f"]
    for name, _, spec in shown:
        columns += [f"{name}>{spec}", f"SIM_{name}>{spec}"]
    columns += ["WON>d", "LOST>d", "AGAIN>d"]
    lines = []
    for row in rows:
        line: list[Any] = [row["policy"], f"{row['jobs_done']}{'' if row['complete'] else '*'}"]
        line += [row["avg_jct_s"] / plain["avg_jct_s"] if plain else None]
        line += [row["simulated"]["avg_jct_s"] / plain["simulated"]["avg_jct_s"] if plain else None]
        for _, key, _ in shown:
            line += [row[key], row["simulated"][key]]
        lines.append([*line, row["cards_won"], row["cards_lost"], row["resubmitted"]])
    return table(columns, lines)
