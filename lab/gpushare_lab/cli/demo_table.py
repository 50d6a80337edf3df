"""What the demo found, as a table, and what a reader sees in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from gpushare_lab.paper.rounds import AGAIN, EXCLUSIVE, OURS, PaperResult
from slurm_gpushare.cli.console import table

PAPER_PS, PAPER_ISD = 1.19, -0.37
"""Points of PS and ISD that the paper reports for its scheduler against random."""
FIGURES: Sequence[tuple[str, Callable[[PaperResult], float]]] = (
    ("mean_jct_s", lambda result: result.mean_jct_s),
    ("ps_pct", lambda result: result.ps_pct),
    ("isd_pct", lambda result: result.isd_pct),
    ("worst_isd_pct", lambda result: result.worst_isd_pct),
    ("shared", lambda result: float(result.shared)),
)


def shown(rounds: Sequence[Sequence[PaperResult]], told: str) -> str:
    """The table, what its rows say, and what was known."""
    lines = [_table(rounds), ""]
    if len(rounds) == 1:
        lines += [*_sentences(rounds[0]), ""]
    else:
        lines += [*_differences(rounds), ""]
    lines.append("ISD: how much longer a job ran than alone. PS: GPU time saved against every job alone.")
    lines.append(f"Emulated GPUs, {told}.")
    lines.append("Known beforehand: nothing. The exclusive run is the workloads' first: there they were measured.")
    return "\n".join(lines)


def _by_policy(rounds: Sequence[Sequence[PaperResult]]) -> dict[str, list[PaperResult]]:
    found: dict[str, list[PaperResult]] = {}
    for results in rounds:
        for result in results:
            found.setdefault(result.policy, []).append(result)
    return found


def _table(rounds: Sequence[Sequence[PaperResult]]) -> str:
    heads = ("MAKESPAN_S", ".0f"), ("MEAN_JCT_S", ".1f"), ("PS%", ".1f"), ("ISD%", ".1f"), ("WORST_ISD%", ".1f")
    if len(rounds) == 1:
        columns = [
            "POLICY",
            *(f"{name}>{spec}" for name, spec in heads),
            "SHARED>",
        ]
        rows = [
            (r.policy, r.makespan_s, r.mean_jct_s, r.ps_pct, r.isd_pct, r.worst_isd_pct, f"{r.shared}/{len(r.jobs)}")
            for r in rounds[0]
        ]
        return table(columns, rows)
    names = ("MEAN_JCT_S", "PS%", "ISD%", "WORST_ISD%", "SHARED")
    columns = ["POLICY", "SEEDS>d", *(f"{name}>" for name in names)]
    return table(columns, [(policy, len(found), *_ranges(found)) for policy, found in _by_policy(rounds).items()])


def _ranges(found: Sequence[PaperResult]) -> list[str]:
    """Mean (lowest to highest) of each figure over the seeds."""
    values = [[figure(result) for result in found] for _, figure in FIGURES]
    return [f"{fmean(row):.1f} ({min(row):.1f} to {max(row):.1f})" for row in values]


def _sentences(results: Sequence[PaperResult]) -> list[str]:
    """What a reader sees in each row."""
    alone = next(result for result in results if result.policy == EXCLUSIVE)
    lines = [
        f"{EXCLUSIVE}: nobody knew these workloads, so each had a GPU of its own and was measured over its first epoch"
        f"{_clusters(alone)}."
    ]
    for result in results:
        if result.policy == EXCLUSIVE:
            continue
        how = {
            OURS: "the helper placed them by what telemetry had told",
            AGAIN: "the helper had also learned from the round before",
            "paper": "each cluster sat beside the one that balances best",
        }.get(result.policy, "they shared without asking who suits whom")
        sooner = 100.0 * (1.0 - result.mean_jct_s / alone.mean_jct_s)
        when = f"{abs(sooner):.0f} % {'sooner' if sooner >= 0.0 else 'later'}"
        lines.append(
            f"{result.policy}: {how}; {result.shared} of {len(result.jobs)} shared, jobs were done {when} on average, "
            f"ran {result.isd_pct:.0f} % longer ({result.worst_isd_pct:.0f} % at worst), and "
            f"{result.ps_pct:.0f} % of the GPU time was saved."
            + (f" It saw {result.taught.rates} rates of one job beside another." if result.taught.rates else "")
        )
    return lines


def learned(result: PaperResult) -> str:
    """What a run has taught, for the reader who watches."""
    if result.policy == EXCLUSIVE:
        return f"{sum(count for _, count in result.taught.clusters)} workloads have their cluster now"
    return f"{result.taught.rates} rates of one job beside another were seen"


def _clusters(result: PaperResult) -> str:
    """Into which clusters the workloads fell."""
    words = [f"{count} in cluster {cluster}" for cluster, count in result.taught.clusters]
    return f"; their numbers put {', '.join(words)}" if words else ""


def _differences(rounds: Sequence[Sequence[PaperResult]]) -> list[str]:
    found, lines = _by_policy(rounds), []
    for ours in (OURS, AGAIN, "paper"):
        for other in ("random", "fcfs"):
            if ours not in found or other not in found:
                continue
            pairs = list(zip(found[ours], found[other], strict=False))
            ps = fmean([a.ps_pct - b.ps_pct for a, b in pairs])
            isd = fmean([a.isd_pct - b.isd_pct for a, b in pairs])
            jct = 100.0 * (fmean([a.mean_jct_s for a, _ in pairs]) / fmean([b.mean_jct_s for _, b in pairs]) - 1.0)
            lines.append(f"{ours} against {other}: PS {ps:+.2f} points, ISD {isd:+.2f} points, mean JCT {jct:+.1f} %.")
    lines.append(f"The paper's own scheduler against random: PS {PAPER_PS:+.2f} points, ISD {PAPER_ISD:+.2f} points.")
    return lines
