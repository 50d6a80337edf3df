"""The paper's figures 2 to 5. Needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpushare_lab.paper.characterize import Characterisation
from slurm_gpushare.knowledge.clusters import ClusterModel
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import check_directory

Floats = NDArray[np.float64]

COLOURS = ("#2a9d8f", "#e9a03b", "#c8553d", "#3d5a80", "#7b5ea7", "#6b705c", "#e07a5f", "#264653")
SHOWN = 12
PICTURES = (".png", ".svg", ".pdf")


def pyplot() -> Any:
    """matplotlib's, drawing into files; an error where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise GpushareError("matplotlib is not installed", "Install it with: pip install matplotlib.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def check_picture(option: str, path: Path | None) -> None:
    """Before a long run: can a picture of this name be drawn at its end?"""
    check_directory(option, path)
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        raise BadInput(f"{option} {path}: no kind of picture", f"Let the name end in {', '.join(PICTURES)}.")
    try:
        pyplot()
    except GpushareError as why:
        raise BadInput(f"{option} {path}: {why.what}", why.hint) from why


def available() -> bool:
    """Whether figures can be drawn here."""
    try:
        pyplot()
    except GpushareError:
        return False
    return True


def characterisation(result: Characterisation, directory: Path) -> list[Path]:
    """Figures 2, 3 and 4 and the elbow, as PNG files."""
    return [
        _ranking(result, directory / "figure2-ranking.png"),
        _interpolation(result, directory / "figure3-interpolation.png"),
        _elbow(result.model, directory / "elbow.png"),
        clusters(result.model, result.points, result.labels, directory / "figure4-clusters.png"),
    ]


def clusters(model: ClusterModel, points: Floats, labels: NDArray[np.intp], path: Path) -> Path:
    """Profiles and centroids in the plane of the first two features."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
    for number, size in enumerate(model.sizes):
        mine = points[labels == number]
        colour = COLOURS[number % len(COLOURS)]
        axes.scatter(mine[:, 0], mine[:, 1], s=18, color=colour, alpha=0.65, label=f"cluster {number} ({size})")
        x, y = model.centroids[number, :2]
        axes.scatter([x], [y], s=150, marker="X", color=colour, edgecolor="black", zorder=3)
        axes.annotate(f"({x:.0f}, {y:.0f})", (x, y), xytext=(9, 7), textcoords="offset points", fontsize=9)
    axes.set(xlabel=f"{model.features[0]} (%)", ylabel=f"{model.features[1]} (%)", title=f"K-means, k = {model.k}")
    axes.legend(loc="upper left", fontsize=9)
    return _save(figure, path)


def matrices(isd_pct: Floats, ps_pct: Floats, labels: Sequence[str], title: str, path: Path) -> Path:
    """Figure 5: slow-down of each kind beside each, and what packing them saves."""
    plt = pyplot()
    figure, both = plt.subplots(1, 2, figsize=(4.2 + 1.2 * len(labels), 1.8 + 0.8 * len(labels)), layout="constrained")
    for axes, values, name, colours in ((both[0], isd_pct, "ISD %", "YlOrRd"), (both[1], ps_pct, "PS %", "YlGn")):
        image = axes.imshow(values, cmap=colours)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(title=name, xlabel="beside cluster")
        middle = (np.nanmin(values) + np.nanmax(values)) / 2.0 if np.isfinite(values).any() else 0.0
        for (row, column), value in np.ndenumerate(values):
            text = "---" if np.isnan(value) else f"{value:.1f}"
            axes.text(column, row, text, ha="center", va="center", color="white" if value > middle else "black")
        figure.colorbar(image, ax=axes, shrink=0.8)
    both[0].set_ylabel("cluster")
    figure.suptitle(title)
    return _save(figure, path)


def _ranking(result: Characterisation, path: Path) -> Path:
    plt = pyplot()
    figure, panels = plt.subplots(1, len(result.rankings), figsize=(11, 4.8), layout="constrained")
    for axes, (target, items) in zip(np.atleast_1d(panels), result.rankings.items(), strict=True):
        best = items[:SHOWN][::-1]
        axes.barh(
            [item.attribute for item in best],
            [item.mean_rank for item in best],
            xerr=[item.spread for item in best],
            color=COLOURS[0],
            ecolor="#555555",
            capsize=3,
        )
        axes.set(title=f"Attributes that tell {target}", xlabel="mean rank of four methods (1 = best)")
        axes.set_xlim(left=0)
    return _save(figure, path)


def _interpolation(result: Characterisation, path: Path) -> Path:
    plt = pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    names = [item.method for item in result.methods]
    for axes, measure in zip(panels, ("rmse", "mse", "mae"), strict=True):
        values = [max(getattr(item, measure), 1e-12) for item in result.methods]
        colours = [COLOURS[0] if name == result.method else "#b0b7bd" for name in names]
        axes.barh(names, values, color=colours)
        axes.set(title=measure.upper(), xscale="log", xlabel="points of a percentage")
    figure.suptitle("Measured points rebuilt from synthetic ones (used: green)")
    return _save(figure, path)


def _elbow(model: ClusterModel, path: Path) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    axes.plot(range(1, len(model.distortions) + 1), model.distortions, marker="o", color=COLOURS[3])
    axes.axvline(model.k, color=COLOURS[2], linestyle="--", label=f"k = {model.k}")
    axes.set(xlabel="clusters", ylabel="distortion", title="Elbow")
    axes.legend()
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    return path
