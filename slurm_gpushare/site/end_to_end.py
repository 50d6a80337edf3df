"""``doctor --end-to-end``: real, short jobs in every form, and what a user would see of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_gpushare.config import load_config
from slurm_gpushare.errors import BadInput
from slurm_gpushare.site.current_setup import collect, gpu_count
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.request_forms import Form, GpusSeen, forms
from slurm_gpushare.slurm.interface import connect
from slurm_gpushare.slurm.trial_jobs import Trial, TrialJobs, run_here


def try_all(partition: str | None, account: str | None, wait_s: float, brief: bool) -> Iterator[Finding]:
    """Every form on this cluster, as the user who asks, in a directory below the current one."""
    facts, config = collect(connect()), load_config()
    partition = partition or next(iter(config.partitions), None)
    if partition is None or facts.partition(partition) is None:
        raise BadInput(f"no partition '{partition or ''}'", "Choose one with -p.")
    # The model with the most nodes: a form that wants two must find them.
    of_model = {
        model: facts.nodes_of_model((partition,), model, only=len(config.gpu_models) == 1)
        for model in config.gpu_models
    }
    model, nodes = max(of_model.items(), key=lambda item: len(item[1]))
    gpus = min((gpu_count(node) for node in nodes), default=0)
    if len(nodes) < 2 or gpus < 2:
        yield warned("end-to-end", f"{partition} has no two nodes of two GPUs", "Some forms cannot work here.")
    other = next((name for node in nodes for name in node.partitions if name != partition), None)
    release = (facts.release.year, facts.release.month)
    wanted = [form for form in forms(model, gpus, partition, other, release) if form.brief or not brief]
    extra = [f"--partition={partition}", *([f"--account={account}"] if account else [])]
    with TemporaryDirectory(prefix="gpushare-trial-", dir=".") as directory:
        jobs = TrialJobs(run_here, Path(directory).resolve(), extra=extra, timeout_s=wait_s)
        yield from findings(try_forms(wanted, jobs))


def try_forms(wanted: Sequence[Form], jobs: TrialJobs) -> list[GpusSeen]:
    """Submit them all."""
    results = jobs.outcomes([Trial(form.command, form.options, form.step) for form in wanted])
    return [GpusSeen(form, result.outcome, result.said) for form, result in zip(wanted, results, strict=True)]


def findings(seen: Sequence[GpusSeen]) -> Iterator[Finding]:
    """One line a form."""
    for one in seen:
        sees = _in_words(one.outcome) + (f" ({one.said})" if one.said and not one.as_expected else "")
        if not one.was_tried:
            yield warned(str(one.form), sees, "Try again when GPUs are idle, or with a longer --wait.")
        elif one.as_expected:
            yield passed(str(one.form), sees)
        else:
            yield failed(
                str(one.form),
                f"{sees}; without us: {_in_words(one.form.expected)}",
                "Run 'gpushare doctor' without --end-to-end: it says what is wrong with the set-up.",
            )


def _in_words(outcome: str) -> str:
    if outcome.startswith(("waits", "refused")) or not outcome:
        return outcome or "it said nothing"
    return f"sees {outcome} GPU" + ("" if outcome == "1" else "s")
