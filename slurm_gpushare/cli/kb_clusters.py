"""``gpushare kb clusters``: the model that puts profiles into clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_gpushare.cli import console
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.settings import DEFAULTS

if TYPE_CHECKING:
    from slurm_gpushare.knowledge.clusters import ClusterModel
    from slurm_gpushare.protocol.settings import Config
    from slurm_gpushare.store import Store

_GPU = click.option("--gpu-model", help="GPU model; all of gpushare.conf unless given.")


@click.group("clusters")
def clusters() -> None:
    """Fit, show and use the model that clusters profiles."""


@clusters.command("fit")
@click.option("-k", "k", type=int, help="Number of clusters; the elbow chooses unless given.")
@_GPU
def fit(k: int | None, gpu_model: str | None) -> None:
    """Fit a model on the store's own profiles and re-tag them.

    Cluster numbers follow the model in force, and the profiles get their new clusters in the same transaction as the
    model, so that the submit hook sees the old ones or the new ones, never some of each.
    """
    from slurm_gpushare.helper.cluster_assignment import refit

    config = console.settings()
    with console.open_store(config) as store:
        fitted = [refit(store, name, k=k) for name in _wanted(gpu_model, config, store)]
    for found in fitted:
        click.echo(f"{found.gpu_model}: model {found.version}, {found.model.k} clusters by {found.model.chosen}")
        _print(found.model)


def _wanted(gpu_model: str | None, config: Config, store: Store | None) -> list[str]:
    """The GPU models that are asked for: one, or all that share here, as the cards call themselves."""
    from slurm_gpushare.store.workloads import models_of, own_name

    if gpu_model or store is None:
        return [own_name(name) for name in ([gpu_model] if gpu_model else config.gpu_models)]
    return list(models_of(store.database, config.gpu_models).values())


@clusters.command("show")
@click.option("--model", "model_file", type=console.FILE, help="A model.json; the one in force unless given.")
@console.JSON
@_GPU
def show(model_file: Path | None, as_json: bool, gpu_model: str | None) -> None:
    """Show the model in force: version, centroids, and how k was chosen."""
    from slurm_gpushare.helper.cluster_assignment import InForce, in_force
    from slurm_gpushare.knowledge.kb import default_model

    config = DEFAULTS if model_file else console.settings_or_defaults()
    store = None if model_file else console.readable_store(config)
    wanted = _wanted(gpu_model, config, store)
    if model_file:
        models = [InForce(_read(model_file))]
    else:
        models = [in_force(store, name) if store else InForce(default_model(), 0, name) for name in wanted]
    if as_json:
        console.echo_models([{"version": m.version, "gpu_model": m.gpu_model, **m.model.to_json()} for m in models])
        return
    for found in models:
        origin = model_file or (f"version {found.version}" if found.version else "shipped, from the paper's workloads")
        of_gpu = f"{found.gpu_model}: " if found.gpu_model else ""
        click.echo(f"{of_gpu}model {origin}: {found.model.k} clusters, k by {found.model.chosen}")
        _print(found.model)


@clusters.command("assign")
@click.option("--model", "model_file", type=console.FILE, help="A model.json; the shipped one unless given.")
@click.option("--profiles", required=True, type=console.FILE, help="Profiles with the model's features.")
@click.option("--out", type=console.FILE, help="Write profile and cluster here, CSV, instead of printing them.")
@click.option("--gpu-model", help="The GPU model to use of files that mix several.")
def assign(model_file: Path | None, profiles: Path, out: Path | None, gpu_model: str | None) -> None:
    """Give profiles of a file their clusters. A profile that lacks a feature has none."""
    import numpy as np

    from slurm_gpushare.knowledge.kb import default_model
    from slurm_gpushare.knowledge.tables import read_profiles, write_rows

    current = _read(model_file) if model_file else default_model()
    known = read_profiles(profiles, gpu_model)
    missing = [name for name in current.features if name not in known.columns and name != "mem_used_pct"]
    if missing:
        raise BadInput(f"{profiles}: no {', '.join(missing)}", "The model needs these columns.")
    share = known.column("mem_used_mib") / known.column("mem_total_mib") * 100.0
    columns = [share if name == "mem_used_pct" else known.column(name) for name in current.features]
    labels = current.assign(np.column_stack(columns)).tolist()
    rows = [(name, label if label >= 0 else "") for name, label in zip(known.names, labels, strict=True)]
    if out:
        write_rows(out, ("profile", "cluster"), rows)
        click.echo(f"{len(rows)} profiles; wrote {out}")
    else:
        click.echo(console.table(["PROFILE", "CLUSTER>"], rows))


def _read(path: Path) -> ClusterModel:
    from slurm_gpushare.knowledge.clusters import ClusterModel

    try:
        return ClusterModel.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error


def _print(model: ClusterModel) -> None:
    heads = [f"{name.upper()}>.1f" for name in model.features]
    pairs = zip(model.centroids.tolist(), model.sizes, strict=True)
    rows = [(number, *row, size) for number, (row, size) in enumerate(pairs)]
    click.echo(console.table(["CLUSTER>", *heads, "SIZE>"], rows))
