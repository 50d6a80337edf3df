"""The paper's workloads: read, stripped of what tells about the user, and enlarged over batch size.

Batch size is used here, on public research data, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import Row, read_rows

Floats = NDArray[np.float64]

SENSITIVE = ("ID", "Model", "Dataset", "Epoch", "BS", "Run_Env")
"""What a user might not want to tell; `Run_Env` is the kind of machine that was rented, and no measurement."""
FEATURES = {"mgup": "MGUP", "mgmap": "MGMAP", "mgtsamp": "MaGTSAMP"}
TARGETS = ("MGUP", "MGMAP")
ENLARGEMENT = 4


@dataclass(frozen=True, slots=True)
class PaperWorkloads:
    """Measured attributes by column, and, apart from them, what only the enlargement may use."""

    attributes: tuple[str, ...]
    values: Floats
    """One row a run."""
    series: tuple[str, ...]
    """Runs of one series differ in batch size alone."""
    batch_size: Floats
    dropped: tuple[str, ...]
    """Columns left out because they are sensitive."""
    constant: tuple[str, ...]
    """Columns left out because they are the same in every run."""

    def column(self, name: str) -> Floats:
        column: Floats = self.values[:, self.attributes.index(name)]
        return column


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How well the measured points come back from a method's synthetic ones, in points of a percentage."""

    method: str
    rmse: float
    mse: float
    mae: float


def read_workloads(path: Path) -> PaperWorkloads:
    """Read the paper's table (docs/knowledge.md says which columns it must have)."""
    rows = read_rows(path, ("Model", "Dataset", "BS", *FEATURES.values()))
    if len(rows) < 3:
        raise BadInput(f"{path}: {len(rows)} workloads", "Clusters of three kinds need at least three.")
    names = [name for name in rows[0].cells if name not in SENSITIVE]
    values = np.array([[_number(row, name) for name in names] for row in rows])
    for name in FEATURES.values():
        column = values[:, names.index(name)]
        if column.max() > 100.0 or column.min() < 0.0:
            raise BadInput(f"{path}: {name} is a percentage, but goes from {column.min():g} to {column.max():g}")
    varies = np.ptp(values, axis=0) > 0.0
    lost = [name for name in FEATURES.values() if not varies[names.index(name)]]
    if lost:
        raise BadInput(f"{path}: {', '.join(lost)} is the same in every row", "There is nothing to cluster.")
    return PaperWorkloads(
        tuple(name for name, keep in zip(names, varies, strict=True) if keep),
        values[:, varies],
        tuple(f"{row.get('Model')} {row.get('Dataset').split('/')[0].strip()}" for row in rows),
        np.array([_number(row, "BS") for row in rows]),
        tuple(name for name in rows[0].cells if name in SENSITIVE),
        tuple(name for name, keep in zip(names, varies, strict=True) if not keep),
    )


def enlarge(workloads: PaperWorkloads, method: str) -> tuple[Floats, Floats]:
    """Synthetic (MGUP, MGMAP, MGTSAMP) between measured batch sizes; with them there are `ENLARGEMENT` times as many.

    Returns them and, stacked, the measured points and what the synthetic ones alone give back in their place.
    """
    measured = np.column_stack([workloads.column(name) for name in FEATURES.values()])
    series = _series(workloads)
    wanted = (ENLARGEMENT - 1) * len(measured)
    counts = _shares([len(rows) for rows in series], wanted)
    synthetic, compared = [], []
    for rows, count in zip(series, counts, strict=True):
        x, y = np.log2(workloads.batch_size[rows]), measured[rows]
        at = np.linspace(x[0], x[-1], count + 2)[1:-1]
        made = np.clip(METHODS[method](x, y, at), 0.0, 100.0)
        synthetic.append(made)
        inner = (x > at[0]) & (x < at[-1])
        if inner.any():
            rebuilt = np.clip(METHODS[method](at, made, x[inner]), 0.0, 100.0)
            compared.append(np.stack([y[inner], rebuilt]))
    return np.vstack(synthetic), np.concatenate(compared, axis=1)


def score(workloads: PaperWorkloads) -> list[Rebuilt]:
    """Every method's error in giving back the measured points, best first."""
    scores = []
    for method in METHODS:
        truth, rebuilt = enlarge(workloads, method)[1]
        error = truth - rebuilt
        mse = float(np.mean(error**2))
        scores.append(Rebuilt(method, math.sqrt(mse), mse, float(np.mean(np.abs(error)))))
    return sorted(scores, key=lambda item: item.rmse)


def _series(workloads: PaperWorkloads) -> list[NDArray[np.intp]]:
    """Rows of each series of at least three batch sizes, in order of batch size."""
    found: list[NDArray[np.intp]] = []
    for name in dict.fromkeys(workloads.series):
        rows = np.array([row for row, other in enumerate(workloads.series) if other == name], dtype=np.intp)
        _, first = np.unique(workloads.batch_size[rows], return_index=True)
        if len(first) >= 3:
            found.append(rows[first])
    if not found:
        raise BadInput("no workload was run with three batch sizes or more", "There is nothing to interpolate over.")
    return found


def _shares(sizes: list[int], total: int) -> list[int]:
    """`total` split in proportion to `sizes`, exactly."""
    ends = np.rint(np.cumsum(sizes) / sum(sizes) * total).astype(int)
    return [int(count) for count in np.diff(ends, prepend=0)]


def _number(row: Row, name: str) -> float:
    row.text(name)
    return row.number(name)


def _linear(x: Floats, y: Floats, at: Floats) -> Floats:
    return np.column_stack([np.interp(at, x, column) for column in y.T])


def _scipy(name: str) -> Callable[[Floats, Floats, Floats], Floats]:
    def interpolate(x: Floats, y: Floats, at: Floats) -> Floats:
        from scipy import interpolate as scipy_interpolate

        if name == "spline":
            degree = min(2, len(x) - 1)
            return np.asarray(scipy_interpolate.make_interp_spline(x, y, k=degree)(at), dtype=np.float64)
        return np.asarray(getattr(scipy_interpolate, name)(x, y)(at), dtype=np.float64)

    return interpolate


METHODS: dict[str, Callable[[Floats, Floats, Floats], Floats]] = {
    "linear": _linear,
    "spline": _scipy("spline"),
    "krogh": _scipy("KroghInterpolator"),
    "cubic": _scipy("CubicSpline"),
    "barycentric": _scipy("BarycentricInterpolator"),
    "pchip": _scipy("PchipInterpolator"),
}
